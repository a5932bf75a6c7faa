"""Full attention over a compact layout: every row sees its ancestors and itself.

External rows (those of a producer) are the first X rows of ``k`` and ``v``. The op reads strided tensors and never
copies them, so a caller need not concatenate: it can hold one buffer of (X + largest T) rows, copy the producer's rows
to its front once per window, let every consumer's projection write behind them and pass ``buffer[: X + T]``. The
gradients of the first X rows come back in front of the consumer's own. A copy costs little time beside the attention
over it (2 X H (K + V) bytes written in bfloat16: 10 KiB a row at 16 heads, 192 and 128), but that memory in every layer
that keeps its inputs.

The alternative, a call over the producer's tensor and one over the own rows, merged by their log-sum-exps, is exact up
to rounding but not bit-equal to one call. It was not built: it reads and writes the output once more, and the backward
pass its float32 accumulator of the query gradient, both larger than the copy it saves.
"""

from harts_titan.ops.attention.mask import BlockTables, TreeMask, block_tables
from harts_titan.ops.attention.op import prepare_attention, tree_attention

__all__ = ["BlockTables", "TreeMask", "block_tables", "prepare_attention", "tree_attention"]
