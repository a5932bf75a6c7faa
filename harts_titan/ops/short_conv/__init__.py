"""Depthwise short convolution with SiLU along the paths of a tree (HARTS 3.4)."""

from harts_titan.ops.short_conv.op import tree_short_conv

__all__ = ["tree_short_conv"]
