"""Operations on plain tensors: one folder per op, the backend chosen by device and availability."""

from harts_titan.ops.backend import AUTO, OpsBackends, backend_names, choose, unavailable_reason

__all__ = ["AUTO", "OpsBackends", "backend_names", "choose", "unavailable_reason"]
