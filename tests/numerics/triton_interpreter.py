"""Run this project's and fla-core 0.6.0's Triton kernels on a CPU: import it before anything that imports triton.

float32 and float16 only: the interpreter computes bfloat16 on raw 16-bit integers. Work-arounds, all of the
interpreter's and none of the package's:

* ``for i in range(n)`` yields Python integers there, and fla's state scan calls ``i.to(tl.int64)``;
* fla re-exports ``tl.gather``, which the interpreter does not replace; fla has a load path for that;
* it rejects the 'bf16x3' product of fla's safe-gate backward;
* triton 3.6 makes range bounds with ``int()`` of a one-element array, which numpy 2.4 refuses;
* a scalar condition that meets a block of conditions becomes 32-bit integers, which are no mask;
* it has no driver, which fla asks for the device's shared memory (fla already falls back).
"""

from __future__ import annotations

import builtins
import os

if os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("set TRITON_INTERPRET=1 before Python starts: triton reads it when a kernel is defined")
os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")

import fla.ops.common.chunk_delta_h as chunk_delta_h
import fla.ops.kda.chunk_intra as chunk_intra
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import _implicit_cvt


def _tensor_range(*bounds):
    for i in builtins.range(*[int(b.handle.data.item()) if hasattr(b, "handle") else int(b) for b in bounds]):
        yield _implicit_cvt(i)


chunk_delta_h.range = _tensor_range
chunk_intra.IS_GATHER_SUPPORTED = False
chunk_intra.SAFE_GATE_DOT_PRECISION = tl.constexpr("ieee")

_patch_lang_tensor = interpreter._patch_lang_tensor


def _patch_index(tensor, *rest):
    _patch_lang_tensor(tensor, *rest)
    tensor.__index__ = lambda self: int(self.handle.data.item())


interpreter._patch_lang_tensor = _patch_index

_splat = interpreter.InterpreterBuilder.create_splat


def _splat_condition(self, ret_ty, arg):
    result = _splat(self, ret_ty, arg)
    return type(result)(result.data.astype(bool), result.dtype) if arg.data.dtype == bool else result


interpreter.InterpreterBuilder.create_splat = _splat_condition
