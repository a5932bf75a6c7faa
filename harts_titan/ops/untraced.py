"""Ops that torch.compile cannot trace, as single nodes of a compiled graph.

The plain PyTorch backends loop over segments and chunks in Python, with shapes that depend on the plan. A compiled
layer calls them through one custom op, which finds the plan by a handle; the gradient runs the op once more. Meant for
the backends of the CPU and for fallbacks: kernels have custom ops of their own.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

_Run = Callable[..., Tensor]
_Shape = Callable[[Sequence[Tensor]], Sequence[int]]

_functions: dict[str, tuple[_Run, _Shape]] = {}
_plans: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def plan_handle(plan: Any) -> Tensor:
    """Return a new handle of ``plan``, an int64 scalar on the CPU; it is valid as long as ``plan`` lives."""
    number = next(_numbers)
    _plans[number] = plan
    return torch.tensor(number)


def _plan(handle: Tensor | None) -> Any:
    return None if handle is None else _plans[int(handle)]


class UntracedOp:
    """An op that is one node of a compiled graph.

    Args:
        name: Unique name.
        run: ``run(plan, *tensors, setting)`` gives one new tensor in the dtype of ``tensors[0]``.
        shape: Its shape from ``tensors``, without running it.
    """

    def __init__(self, name: str, run: _Run, *, shape: _Shape) -> None:
        if name in _functions:
            raise ValueError(f"an untraced op named {name!r} exists already; choose another name")
        self.name = name
        _functions[name] = (run, shape)

    def __call__(self, handle: Tensor | None, tensors: Sequence[Tensor], setting: float = 0.0) -> Tensor:
        """Run the op.

        Args:
            handle: From :func:`plan_handle`; None for an op that reads no plan.
            tensors: Its tensors; differentiable in those of floating dtype.
            setting: Its number.
        """
        return _forward(self.name, handle, list(tensors), setting)


@torch.library.custom_op(
    "harts_titan::untraced",
    mutates_args=(),
    schema="(str name, Tensor? handle, Tensor[] tensors, float setting) -> Tensor",
)
def _forward(name, handle, tensors, setting):
    return _functions[name][0](_plan(handle), *tensors, setting)


@_forward.register_fake
def _(name, handle, tensors, setting):
    return tensors[0].new_empty(_functions[name][1](tensors))


@contextlib.contextmanager
def _autograd_enabled() -> Iterator[None]:
    # Inside a custom op the dispatcher passes autograd by.
    off = torch._C._SetExcludeDispatchKeyGuard
    with contextlib.ExitStack() as stack:
        for key in ("ADInplaceOrView", "AutogradFunctionality"):
            stack.enter_context(off(getattr(torch._C.DispatchKey, key), False))
        stack.enter_context(torch.enable_grad())
        yield


@torch.library.custom_op(
    "harts_titan::untraced_backward",
    mutates_args=(),
    schema="(str name, Tensor? handle, Tensor[] tensors, float setting, Tensor dout) -> Tensor[]",
)
def _backward(name, handle, tensors, setting, dout):
    with _autograd_enabled():
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
        out = _functions[name][0](_plan(handle), *leaves, setting)
        wanted = [x for x in leaves if x.requires_grad]
        given = iter(torch.autograd.grad(out, wanted, dout, materialize_grads=True))
    return [next(given).contiguous() if x.requires_grad else torch.empty_like(x) for x in leaves]


@_backward.register_fake
def _(name, handle, tensors, setting, dout):
    return [x.new_empty(x.shape) for x in tensors]


def _save(ctx, inputs, output):
    ctx.name, handle, tensors, ctx.setting = inputs
    ctx.save_for_backward(handle, *tensors)


def _differentiate(ctx, dout):
    handle, *tensors = ctx.saved_tensors
    grads = _backward(ctx.name, handle, tensors, ctx.setting, dout)
    return None, None, [d if x.is_floating_point() else None for d, x in zip(grads, tensors, strict=True)], None


_forward.register_autograd(_differentiate, setup_context=_save)
