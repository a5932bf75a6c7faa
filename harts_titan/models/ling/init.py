"""Initial weights of Ling, the same for every layout of devices."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from harts_titan.models.ling.config import LingArgs
from harts_titan.ops.dtypes import wide_dtype
from harts_titan.parallel.sharding import copy_from_full_

_SLOWEST_DECAY, _FASTEST_DECAY = 1e-3, 0.5


def _generator(name: str, device: torch.device) -> torch.Generator:
    # Seeded by name: the values of a parameter do not depend on which others exist (pipeline stages) or on their order.
    digest = hashlib.sha256(f"{torch.initial_seed()}/{name}".encode()).digest()
    return torch.Generator(device=device).manual_seed(int.from_bytes(digest[:7], "little"))


def _decay_amplitude(n_heads: int, name: str, device: torch.device) -> Tensor:
    amplitude = torch.empty(n_heads, dtype=torch.float32, device=device)
    return amplitude.uniform_(1.0, 16.0, generator=_generator(name, device))


def _decay_bias(args: LingArgs, prefix: str, device: torch.device) -> Tensor:
    """Bias for which a zero gate input gives log decays spread evenly (in log) over 1e-3 .. 0.5 per token.

    Not in the paper: with the safe gate ``g = bound * sigmoid(exp(A_log) * (f + dt_bias))`` this keeps every channel
    out of saturation, whatever its amplitude.
    """
    amplitude_H = _decay_amplitude(args.n_heads, f"{prefix}A_log", device)
    decay_HK = torch.empty(args.n_heads, args.kda_head_dim, dtype=torch.float32, device=device)
    generator = _generator(f"{prefix}dt_bias", device)
    decay_HK.uniform_(math.log(_SLOWEST_DECAY), math.log(_FASTEST_DECAY), generator=generator)
    return ((decay_HK.exp() / -args.kda_lower_bound).logit() / amplitude_H[:, None]).flatten()


def _initial_value(name: str, parameter: Tensor, args: LingArgs) -> Tensor:
    device = parameter.device
    if name.endswith("norm.weight"):
        return torch.ones(parameter.shape, dtype=parameter.dtype, device=device)
    if name.endswith("A_log"):
        return _decay_amplitude(args.n_heads, name, device).log()
    if name.endswith("dt_bias"):
        return _decay_bias(args, name.removesuffix("dt_bias"), device)
    # Drawn in float32 or wider, so that 16-bit models start from rounded values of the same numbers.
    value = torch.empty(parameter.shape, dtype=wide_dtype(parameter.dtype), device=device)
    generator = _generator(name, device)
    if name.endswith("conv1d.weight"):
        bound = parameter.shape[1] ** -0.5
        return value.uniform_(-bound, bound, generator=generator)
    std = args.init_std
    if name.endswith(("o_proj.weight", "dense.weight", "w2", "w2.weight")):
        # Projections into the residual stream: its variance must not grow with depth.
        std /= math.sqrt(2 * args.n_layers)
    return nn.init.trunc_normal_(value, std=std, a=-3 * std, b=3 * std, generator=generator)


@torch.no_grad()
def init_ling_weights(model: nn.Module, args: LingArgs, buffer_device: torch.device | None = None) -> None:
    """Fill the parameters of a model (or a stage, or a sharded model) and zero its expert biases.

    Every rank draws whole parameters, one at a time, and keeps its shard: the start does not depend on the layout.

    Args:
        model: With parameters on a real device.
        args: The architecture.
        buffer_device: Where the expert biases go; default: where they are.
    """
    for name, parameter in model.named_parameters():
        copy_from_full_(parameter, _initial_value(name, parameter, args))
    for module in model.modules():
        bias = getattr(module, "expert_bias", None)
        if isinstance(bias, Tensor):
            module.expert_bias = torch.zeros_like(bias, device=buffer_device or bias.device)
