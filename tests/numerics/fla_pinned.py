"""fla-core's ``chunk_kda`` with one fixed configuration per kernel: the baseline of the KDA checks and benchmarks.

fla's autotuners time every configuration when a process starts, and two configurations of one kernel may round
differently. So importing this module replaces the configuration list of every kernel ``chunk_kda`` runs by a single
entry, the ones that were checked against float64 and timed on an H200 (fla issue 988: Hopper miscompiles some).
"""

from __future__ import annotations

import os
import sys
from typing import Any

import triton

REQUIRED_FLA_VERSION = "0.6.0"

# fla may swap a kernel for a TileLang or Gluon one with other rounding; it reads the variable when it is imported.
os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")
_fla_was_imported = "fla" in sys.modules

import fla  # noqa: E402
import fla.backends  # noqa: E402

if fla.__version__ != REQUIRED_FLA_VERSION:
    raise ImportError(
        f"fla-core {fla.__version__} is installed, the baseline needs exactly {REQUIRED_FLA_VERSION}: older ones let "
        f"later tokens change earlier rows, newer ones are unchecked; pip install fla-core=={REQUIRED_FLA_VERSION}"
    )
if not fla.backends._DISPATCH_DISABLED:
    when = "fla was imported before harts_titan" if _fla_was_imported else "the environment sets it to another value"
    raise ImportError(f"FLA_DISABLE_BACKEND_DISPATCH must be 1 before fla is imported ({when})")

from fla.modules.norm import l2norm as _l2norm  # noqa: E402
from fla.ops.common import chunk_delta_h as _delta_h  # noqa: E402
from fla.ops.gla import chunk as _gla  # noqa: E402
from fla.ops.kda import chunk_bwd as _chunk_bwd  # noqa: E402
from fla.ops.kda import chunk_intra as _chunk_intra  # noqa: E402
from fla.ops.kda import chunk_kda  # noqa: E402
from fla.ops.kda import gate as _gate  # noqa: E402
from fla.ops.kda import wy_fast as _wy_fast  # noqa: E402
from fla.ops.utils import cumsum as _cumsum  # noqa: E402

__all__ = ["PINNED", "REQUIRED_FLA_VERSION", "chunk_kda", "pin"]

# kernel -> (module, meta-parameters, warps, pipeline stages)
PINNED: dict[str, tuple[Any, dict[str, int], int, int]] = {
    "l2norm_fwd_kernel": (_l2norm, {"BT": 8}, 4, 3),
    "l2norm_bwd_kernel": (_l2norm, {"BT": 8}, 4, 3),
    "kda_gate_chunk_cumsum_vector_kernel": (_gate, {"BS": 32}, 4, 3),
    "kda_gate_bwd_kernel": (_gate, {}, 4, 2),
    "chunk_kda_fwd_kernel_intra_sub_chunk": (_chunk_intra, {}, 4, 2),
    "chunk_kda_fwd_kernel_inter_solve_fused": (_chunk_intra, {"BK": 64}, 1, 3),
    "recompute_w_u_fwd_kda_kernel": (_wy_fast, {}, 4, 2),
    "chunk_gla_fwd_kernel_o": (_gla, {"BK": 64, "BV": 128}, 4, 2),
    "chunk_kda_bwd_kernel_dAv": (_chunk_bwd, {}, 4, 2),
    "chunk_kda_bwd_kernel_wy_dqkg_fused": (_chunk_bwd, {"BK": 64, "BV": 64}, 4, 2),
    "chunk_kda_bwd_kernel_intra": (_chunk_intra, {}, 4, 2),
    "chunk_local_cumsum_vector_kernel": (_cumsum, {"BS": 32}, 4, 3),
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": (_delta_h, {"BV": 32}, 4, 2),
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": (_delta_h, {"BV": 32}, 4, 2),
}


def pin(name: str, meta: dict[str, int], num_warps: int, num_stages: int) -> None:
    """Replace the autotuning list of one kernel of ``PINNED`` by a single configuration.

    Args:
        name: Key of ``PINNED``.
        meta: Constexpr meta-parameters the autotuner chooses (tile sizes).
        num_warps: Warps per program.
        num_stages: Software pipeline stages.

    Raises:
        ImportError: If the installed fla-core has no such autotuned kernel.
    """
    module = PINNED[name][0]
    tuner = getattr(module, name, None)
    while tuner is not None and not hasattr(tuner, "configs"):
        tuner = getattr(tuner, "fn", None)
    if tuner is None:
        raise ImportError(f"fla-core {fla.__version__} has no autotuned kernel {module.__name__}.{name}")
    tuner.configs = [triton.Config(dict(meta), num_warps=num_warps, num_stages=num_stages)]
    tuner.cache.clear()


for _name, (_, _meta, _warps, _stages) in PINNED.items():
    pin(_name, _meta, _warps, _stages)
