"""A kernel with faults on purpose: what ``gpu_sanitize.py`` must see the sanitizer report."""

import triton
import triton.language as tl


@triton.jit
def planted_faults(x, N: tl.constexpr):
    """Write N words to ``x``, which has fewer; all threads write one shared word and read it without a barrier."""
    o = tl.arange(0, N)
    word = tl.inline_asm_elementwise(
        "{ .shared .b32 word; st.volatile.shared.b32 [word], $1; ld.volatile.shared.b32 $0, [word]; }",
        "=r,r",
        [o],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.store(x + o, word)
