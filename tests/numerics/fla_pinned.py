"""fla-core's ``chunk_kda`` with one fixed configuration per kernel: the baseline of the KDA checks and benchmarks.

``harts_titan.ops.kda.fla_op`` checks the version and pins the configurations when it is imported.
"""

from __future__ import annotations

from harts_titan.ops.kda.fla_op import PINNED, REQUIRED_FLA_VERSION, chunk_kda, pin

__all__ = ["PINNED", "REQUIRED_FLA_VERSION", "chunk_kda", "pin"]
