"""Depthwise short convolution with SiLU along the paths of a tree (HARTS 3.4)."""

from harts_titan.ops.short_conv.op import prepare_short_conv, tree_short_conv
from harts_titan.ops.short_conv.taps import ConvTaps

__all__ = ["ConvTaps", "prepare_short_conv", "tree_short_conv"]
