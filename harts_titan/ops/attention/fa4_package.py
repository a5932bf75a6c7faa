"""What this project uses of flash-attn-4 that is not its public interface, checked against the installed package.

Written for 4.0.0b36. Missing entry points are an ``ImportError``, which the choice of a backend reports; a tile
scheduler of another form costs the order of the programs, which is speed and no number, and is a warning.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from flash_attn.cute import tile_scheduler
from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

logger = logging.getLogger(__name__)

WRITTEN_FOR = "4.0.0b36"
_USED: dict[Callable[..., object], tuple[str, ...]] = {
    _flash_attn_fwd: ("softmax_scale", "mask_mod", "aux_tensors", "block_sparse_tensors", "return_lse"),
    _flash_attn_bwd: ("mask_mod", "aux_tensors", "block_sparse_tensors"),
}
_BACKWARD_ORDER = ("q", "k", "v", "out", "dout", "lse", "softmax_scale")
_swapping = threading.Lock()


def _installed() -> str:
    try:
        return f"flash-attn-4 {version('flash-attn-4')} is installed, this backend was written for {WRITTEN_FOR}"
    except PackageNotFoundError:
        return f"flash-attn-4 has no version, this backend was written for {WRITTEN_FOR}"


def check_entry_points() -> None:
    """Compare the signatures of the functions in use with what is passed to them.

    Raises:
        ImportError: If a parameter is missing, with its name and both versions.
    """
    for function, used in _USED.items():
        parameters = inspect.signature(function).parameters
        missing = [name for name in used if name not in parameters]
        if missing:
            raise ImportError(f"{function.__name__} takes no {', '.join(missing)}; {_installed()}")
    first = tuple(inspect.signature(_flash_attn_bwd).parameters)[: len(_BACKWARD_ORDER)]
    if first != _BACKWARD_ORDER:
        raise ImportError(f"{_flash_attn_bwd.__name__} begins with {first}, not {_BACKWARD_ORDER}; {_installed()}")


def order_problem() -> str | None:
    """Why :func:`last_queries_first` does not fit the installed package; None if it does."""
    scheduler = getattr(tile_scheduler, "SingleTileScheduler", None)
    method = getattr(scheduler, "get_current_work", None)
    if method is None:
        return "tile_scheduler.SingleTileScheduler.get_current_work does not exist"
    found = tuple(inspect.signature(method).parameters)
    if found != ("self", "loc", "ip"):
        return f"SingleTileScheduler.get_current_work takes {found}, not ('self', 'loc', 'ip')"
    fields = getattr(getattr(scheduler, "Params", None), "__annotations__", {})
    missing = {"num_block", "cluster_shape_mn"} - set(fields)
    if missing:
        return f"SingleTileScheduler.Params has no {', '.join(sorted(missing))}"
    if not hasattr(tile_scheduler, "WorkTileInfo"):
        return "tile_scheduler.WorkTileInfo does not exist"
    return None


def _reversed_work(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_current_work(self, *, loc=None, ip=None):
        work = original(self, loc=loc, ip=ip)
        block, *rest = work.tile_idx
        # Clusters of several programs round the grid up: its last blocks would be negative. No branch: this is traced.
        clustered = tuple(self.params.cluster_shape_mn) != (1, 1)
        block = (self.params.num_block - 1 - block, block)[clustered]
        return tile_scheduler.WorkTileInfo((block, *rest), work.is_valid_tile)

    return get_current_work


@contextlib.contextmanager
def last_queries_first() -> Iterator[None]:
    """Kernels compiled inside run their programs from the last block of queries to the first.

    flash-attn-4 has this order for its causal mask only: with a mask function it takes ``causal`` for false
    (``interface._resolve_causal_local_window``), and ``FlashAttentionForwardSm90`` chooses ``SingleTileScheduler``,
    which has no order to choose. A kernel is compiled once per mask function, so the order belongs to the function. One
    thread at a time is inside; another that compiles meanwhile without it gets the order too, with equal results. Only
    for compute capability 9: kernels of others cut their blocks in other ways.
    """
    if not _FITS:
        yield
        return
    scheduler = tile_scheduler.SingleTileScheduler
    with _swapping:
        original = scheduler.get_current_work
        scheduler.get_current_work = _reversed_work(original)
        try:
            yield
        finally:
            scheduler.get_current_work = original


check_entry_points()
_problem = order_problem()
_FITS = _problem is None
if _problem is not None:
    logger.warning("%s; %s: forward attention runs in the package's order, up to 12 %% slower", _problem, _installed())
