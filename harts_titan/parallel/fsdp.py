"""Data parallelism with FSDP2: gradients are sums, states stay float32, one flag per backward.

The loss is already divided by the totals of the whole step, so reductions must add, never average.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

RESHARD_POLICIES = ("default", "always", "never")


def single_rank_mesh(device_type: str) -> DeviceMesh:
    """Return a mesh of this one process, for a model that is sharded only to keep float32 master weights.

    Starts a process group of one rank if there is none, so that an engine outside a launcher can be sharded as well.
    """
    if not dist.is_initialized():
        backend = "nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device_type, (1,), mesh_dim_names=("fsdp",))


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    wide_modules: tuple[type[nn.Module], ...] = (),
    reshard_after_forward: str = "default",
) -> None:
    """Apply ``fully_shard`` to the embeddings, every layer, the head and the root, in place.

    Args:
        model: With ``tok_embeddings``, ``layers``, ``norm`` and ``output``, each of which may be None.
        mesh: Data-parallel mesh; one rank is legal.
        param_dtype: Dtype parameters are gathered and computed in.
        reduce_dtype: Dtype gradients are added in.
        wide_modules: Module types inside the layers whose own parameters are gathered in their own dtype; their method
            ``gathered``, if they have it, is a forward method too.
        reshard_after_forward: "default" and "always" free gathered layers after forward, "never" keeps them; the head
            is freed only by "always".

    Raises:
        ValueError: If ``reshard_after_forward`` is unknown.
    """
    if reshard_after_forward not in RESHARD_POLICIES:
        raise ValueError(
            f"parallelism.fsdp_reshard_after_forward is {reshard_after_forward!r}; choose one of {RESHARD_POLICIES}"
        )
    reshard = reshard_after_forward != "never"
    # cast_forward_inputs would round float32 states that pass between layers to param_dtype.
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    wide_policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    shared: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    embeddings = _child(model, "tok_embeddings")
    if embeddings is not None:
        fully_shard(embeddings, reshard_after_forward=reshard, **shared)
    layers = _child(model, "layers")
    for layer in layers.children() if layers is not None else ():
        for module in layer.modules():
            if isinstance(module, wide_modules) and _needs_own_group(module, param_dtype):
                fully_shard(module, mesh=mesh, mp_policy=wide_policy, reshard_after_forward=reshard)
                register_fsdp_forward_method(module, "gathered")
        fully_shard(layer, reshard_after_forward=reshard, **shared)
    head = [module for module in (_child(model, "norm"), _child(model, "output")) if module is not None]
    if head:
        # Backward starts with the head: freeing it after forward only costs a second gather.
        fully_shard(head, reshard_after_forward=reshard_after_forward == "always", **shared)
    fully_shard(model, **shared)
    _sum_gradients(model)


def _child(model: nn.Module, name: str) -> nn.Module | None:
    # The parts a pipeline stage does not have are None.
    child = getattr(model, name)
    assert child is None or isinstance(child, nn.Module)
    return child


def _needs_own_group(module: nn.Module, param_dtype: torch.dtype) -> bool:
    # One group has one dtype; without this the parameters would be gathered as param_dtype with their neighbours.
    return any(parameter.dtype != param_dtype for parameter in module.parameters(recurse=False))


def _sum_gradients(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo has no pre-multiplied sum; a plain sum is what factor 1 means on every backend.
            module.set_force_sum_reduction_for_comms(True)


def set_last_backward(model: nn.Module, last: bool) -> None:
    """Say, before every backward call of a step, whether it is the step's last.

    Gradients are kept unreduced (in the reduce dtype) until the last call, so a step reduces every group exactly once.
    Does nothing on a model that is not sharded.
    """
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
