"""Log-probabilities of positions and entropies of rows from compact logits or hidden rows."""

from harts_titan.ops.logprob.op import linear_logprobs, recover_logprobs
from harts_titan.ops.logprob.reference import IGNORED_LABEL
from harts_titan.ops.logprob.sharded import VocabularyShard

__all__ = ["IGNORED_LABEL", "VocabularyShard", "linear_logprobs", "recover_logprobs"]
