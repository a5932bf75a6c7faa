"""Full attention over a compact layout: every row sees its ancestors and itself."""

from harts_titan.ops.attention.mask import BlockTables, TreeMask, block_tables
from harts_titan.ops.attention.op import prepare_attention, tree_attention

__all__ = ["BlockTables", "TreeMask", "block_tables", "prepare_attention", "tree_attention"]
