"""Modules whose parameters stay wide when the model around them is cast; the rule is :mod:`harts_titan.ops.dtypes`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from harts_titan.ops.dtypes import wide_dtype


class WideModule(nn.Module):
    """A module whose own parameters never go below float32, whatever the model is cast to.

    ``model.to(torch.bfloat16)`` keeps them in float32; ``model.to(torch.float64)`` makes them float64. Buffers named in
    ``fixed_float32`` stay float32 in both cases.
    """

    fixed_float32: tuple[str, ...] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        def keep_wide(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if not tensor.is_floating_point() or moved.dtype == tensor.dtype:
                return moved
            if any(tensor is getattr(self, name, None) for name in self.fixed_float32):
                return tensor.to(moved.device)
            return tensor.to(moved.device, wide_dtype(moved.dtype))

        if recurse:
            for module in self.children():
                module._apply(fn)
        # The children are done above with the caller's function; only this module's own tensors are protected.
        return super()._apply(keep_wide, recurse=False)
