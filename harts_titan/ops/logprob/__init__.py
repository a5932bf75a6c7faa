"""Log-probabilities of positions and entropies of rows from compact logits or hidden rows."""

from harts_titan.ops.logprob.op import IGNORED_LABEL, linear_logprobs, recover_logprobs

__all__ = ["IGNORED_LABEL", "linear_logprobs", "recover_logprobs"]
