"""Run the product on a plan and collect everything that must not depend on how the plan shares work.

Results are in the order of the step batch (flat positions S) and gradients carry the checkpoint's names, so runs in
different modes, and the oracle, can be compared entry by entry.

Letters: S positions of the step, T rows of a call, E experts, A experts per row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harts_titan.models.common.router_losses import (
    expert_counts,
    load_balancing_loss,
    trajectory_load_balancing_loss,
    z_loss,
)
from harts_titan.models.common.tree_inputs import TreeInputs
from harts_titan.models.ling import Ling, LingArgs, LingStateDictAdapter, from_hf_config
from harts_titan.models.ling.attention import KDACore
from harts_titan.ops import OpsBackends
from harts_titan.tree import CallLayout, StepPlan, plan_step
from tests.oracle import ling as oracle

# KDA (dense), KDA (MoE), MLA (MoE): every kind of layer once, small enough for hundreds of forests.
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "layer_group_size": 3,
    "num_attention_heads": 2,
    "head_dim": 8,
    "short_conv_kernel_size": 4,
    "kda_lower_bound": -5.0,
    "q_lora_rank": None,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "rope_theta": 6e6,
    "rms_norm_eps": 1e-6,
    "intermediate_size": 48,
    "first_k_dense_replace": 1,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 16,
    "num_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 16,
    "vocab_size": 48,
    "max_position_embeddings": 4096,
}
DENSE = {**SMALL, "first_k_dense_replace": 3}
# Two KDA layers, then MLA layers only: layers 3 and 4 lie behind the last complete group of three.
FIVE_LAYERS = {
    **SMALL,
    "num_hidden_layers": 5,
    "q_lora_rank": 10,
    "expert_swiglu_limit_list": [0.0, 0.0, 0.0, 0.3, 0.3],
    "share_expert_swiglu_limit_list": [0.0, 0.0, 0.4, 0.4, 0.5],
}

Z_COEF, BALANCE_COEF, TRAJECTORY_BALANCE_COEF = 0.1, 0.7, 0.3


@dataclass
class Result:
    """One execution of a step; gradients are those of :func:`step_loss`."""

    logprob_S: Tensor
    entropy_S: Tensor
    z: float = 0.0
    balance: float = 0.0
    trajectory_balance: float = 0.0
    counts_LE: Tensor | None = None
    topk_LSA: list[Tensor] = field(default_factory=list)
    """Sorted experts of each position, one tensor per MoE layer."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    cores: list[list[tuple[Tensor, ...]]] = field(default_factory=list)
    """Per call, per KDA layer: q, k, v, f, b and the output o of its rows."""


def model_args(config: dict[str, Any] | Path) -> LingArgs:
    """Architecture with so few rows per chunk of the LM head that every forest needs several chunks."""
    return replace(from_hf_config(config), head_rows_per_chunk=16)


def build_model(config: dict[str, Any], weights: oracle.Weights, dtype: torch.dtype = torch.float64) -> Ling:
    args = model_args(config)
    model = Ling(args).to(dtype)
    state = LingStateDictAdapter(args, None).from_hf({name: tensor.clone() for name, tensor in weights.items()})
    model.load_state_dict(state, strict=True)
    return model


def gradients_by_checkpoint_name(model: Ling) -> dict[str, Tensor]:
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return LingStateDictAdapter(model.model_args, None).to_hf(grads)


def coefficients(num_positions: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random weights of the positions' log-probs and entropies: a loss in which no two positions can be confused."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return tuple(torch.randn(num_positions, generator=generator, dtype=torch.float64) for _ in range(2))


def plan_forest(tokens: np.ndarray, offsets: np.ndarray, **options: Any) -> StepPlan:
    return plan_step(tokens, offsets, **{"capacity": 10_000, "chunk_size": 4} | options)


Mutation = Callable[[CallLayout], CallLayout]


def execute(
    model: Ling,
    plan: StepPlan,
    *,
    backward: bool = True,
    keep_cores: bool = False,
    seed: int = 0,
    mutate: Mutation | None = None,
    backends: OpsBackends | None = None,
) -> Result:
    """Run every consumer of a plan and, with ``backward``, add up the gradients of the step's loss."""
    num_positions = plan.stats.original_tokens
    dtype = next(model.parameters()).dtype
    result = Result(torch.full((num_positions,), torch.nan, dtype=dtype), torch.zeros(num_positions, dtype=dtype))
    model.zero_grad(set_to_none=True)
    assert not (keep_cores and plan.mode == "expanded"), "the count pass of a consumer in several calls would be kept"
    handles = _keep_cores(model, result) if keep_cores else []
    with torch.set_grad_enabled(backward):
        for consumer in plan.consumers():
            layouts = [mutate(call) if mutate else call for call in consumer.calls]
            inputs = [TreeInputs.from_layout(layout, backends=backends) for layout in layouts]
            _run_consumer(model, list(zip(layouts, inputs)), result, seed, backward)
    for handle in handles:
        handle.remove()
    if backward:
        result.gradients = gradients_by_checkpoint_name(model)
        model.zero_grad(set_to_none=True)
    return result


def _keep_cores(model: Ling, result: Result) -> list[Any]:
    def keep(_: Any, args: tuple[Any, ...], output: Tensor) -> None:
        result.cores[-1].append(tuple(t.detach() for t in (*args[:5], output)))

    handles = [model.register_forward_pre_hook(lambda *_: result.cores.append([]))]
    return handles + [m.register_forward_hook(keep) for m in model.modules() if isinstance(m, KDACore)]


def _run_consumer(
    model: Ling, calls: list[tuple[CallLayout, TreeInputs]], result: Result, seed: int, backward: bool
) -> None:
    num_positions = result.logprob_S.numel()
    positions = sum(x.num_positions for _, x in calls)
    whole_counts_LE = None
    if backward and len(calls) > 1:
        # Load balancing multiplies counts and probabilities of the whole consumer.
        with torch.no_grad():
            parts = [(model(x).router, x.multiplicity_T) for _, x in calls]
        counts = [expert_counts(router, multiplicity_T) for router, multiplicity_T in parts if router]
        whole_counts_LE = torch.stack(counts).sum(0) if counts else None
    for layout, x in calls:
        out = model(x)
        source, row = layout.source_position_S, x.row_of_position_S
        entropy_S = out.entropy_T[row]
        result.logprob_S[source] = out.logprob_S.detach()
        result.entropy_S[source] = entropy_S.detach()
        for i, routed in enumerate(out.router):
            topk_TA = routed.topk_TA.sort(dim=1).values
            if len(result.topk_LSA) <= i:
                result.topk_LSA.append(topk_TA.new_zeros(num_positions, topk_TA.shape[1]))
            result.topk_LSA[i][source] = topk_TA[row]
        if out.router:
            counts_LE = expert_counts(out.router, x.multiplicity_T)
            result.counts_LE = counts_LE if result.counts_LE is None else result.counts_LE + counts_LE
        if not backward:
            continue
        # A step's router losses weigh each consumer by its share of the step's positions.
        share = positions / num_positions
        z = z_loss(out.router, x.multiplicity_T, num_positions=positions) * share
        balance = share * load_balancing_loss(
            out.router, x.multiplicity_T, num_positions=positions, counts_LE=whole_counts_LE
        )
        along_paths = share * trajectory_load_balancing_loss(out.router, x.statistics, num_positions=positions)
        result.z += float(z.detach())
        result.balance += float(balance.detach())
        result.trajectory_balance += float(along_paths.detach())
        of_logprob_S, of_entropy_S = (c[source].to(entropy_S.dtype) for c in coefficients(num_positions, seed))
        loss = (of_logprob_S * out.logprob_S).sum() + (of_entropy_S * entropy_S).sum()
        (loss + Z_COEF * z + BALANCE_COEF * balance + TRAJECTORY_BALANCE_COEF * along_paths).backward()


def execute_oracle(
    config: dict[str, Any],
    weights: oracle.Weights,
    trajectories: list[list[int]],
    groups: list[list[int]],
    seed: int = 0,
) -> Result:
    """The same step by the oracle; ``groups`` are the trajectories of each consumer."""
    leaves = {n: w.clone().requires_grad_(not n.endswith("expert_bias")) for n, w in weights.items()}
    outputs = [oracle.forward(t, leaves, config) for t in trajectories]
    logprob_S, entropy_S = torch.cat([o.logprob_L for o in outputs]), torch.cat([o.entropy_L for o in outputs])
    num_positions = logprob_S.numel()
    of_logprob_S, of_entropy_S = coefficients(num_positions, seed)
    loss = (of_logprob_S * logprob_S).sum() + (of_entropy_S * entropy_S).sum()
    result = Result(logprob_S.detach(), entropy_S.detach())
    if outputs[0].topk:
        z = balance = along_paths = torch.zeros((), dtype=torch.float64)
        for group in groups:
            members = [outputs[n] for n in group]
            share = sum(len(trajectories[n]) for n in group) / num_positions
            z = z + share * oracle.z_loss(members)
            balance = balance + share * oracle.load_balance_loss(members, config)
            along_paths = along_paths + share * oracle.load_balance_loss_per_trajectory(members, config)
        loss = loss + Z_COEF * z + BALANCE_COEF * balance + TRAJECTORY_BALANCE_COEF * along_paths
        result.z, result.balance = float(z.detach()), float(balance.detach())
        result.trajectory_balance = float(along_paths.detach())
        result.counts_LE = torch.tensor(oracle.expert_counts(outputs, config))
        for layer in range(len(outputs[0].topk)):
            rows = [sorted(chosen) for o in outputs for chosen in o.topk[layer]]
            result.topk_LSA.append(torch.tensor(rows))
    loss.backward()
    result.gradients = {
        n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in leaves.items() if w.requires_grad
    }
    return result


@dataclass
class Differences:
    """Largest differences between two executions."""

    logprob: float
    entropy: float
    gradient: float
    """Largest over parameters of max|d| / max|g|; 0 where both are zero."""
    worst_gradient: str
    router_loss: float
    counts_equal: bool


def compare(got: Result, want: Result) -> Differences:
    gradient, worst = 0.0, ""
    assert got.gradients.keys() == want.gradients.keys(), set(got.gradients) ^ set(want.gradients)
    for name, reference in want.gradients.items():
        difference = float((got.gradients[name] - reference).abs().max())
        scale = float(reference.abs().max())
        relative = 0.0 if difference == 0.0 else difference / scale if scale > 0.0 else float("inf")
        if not relative <= gradient:  # a NaN counts as worst
            gradient, worst = relative, name
    router = [abs(getattr(got, n) - getattr(want, n)) for n in ("z", "balance", "trajectory_balance")]
    counts_equal = (got.counts_LE is None) == (want.counts_LE is None)
    if got.counts_LE is not None and want.counts_LE is not None:
        counts_equal = torch.equal(got.counts_LE, want.counts_LE)
    return Differences(
        logprob=_largest(got.logprob_S - want.logprob_S),
        entropy=_largest(got.entropy_S - want.entropy_S),
        gradient=gradient,
        worst_gradient=worst,
        router_loss=max(router),
        counts_equal=counts_equal,
    )


def _largest(difference: Tensor) -> float:
    # A NaN must not pass as small.
    return float("inf") if bool(torch.isnan(difference).any()) else float(difference.abs().max())


def rows_by_source(plan: StepPlan) -> tuple[Tensor, Tensor]:
    """Call (numbered over all consumers) and own row of every position of the step."""
    call_S = torch.full((plan.stats.original_tokens,), -1)
    row_S = torch.full((plan.stats.original_tokens,), -1)
    calls = [call for consumer in plan.consumers() for call in consumer.calls]
    for i, call in enumerate(calls):
        call_S[call.source_position_S] = i
        row_S[call.source_position_S] = call.row_of_position_S - call.num_external_rows
    return call_S, row_S


def core_outputs_differ(model: Ling, compact: StepPlan, result: Result, expanded: StepPlan) -> int:
    """Run the KDA cores of the expanded plan on the inputs the compact run gave them; count rows with other bits.

    Only the core is repeated: what lies between two cores (matrix products over another number of rows) may round
    differently, the core itself must not.
    """
    cores = [module for module in model.modules() if isinstance(module, KDACore)]
    call_S, row_S = rows_by_source(compact)
    different = 0
    with torch.no_grad():
        for layout in (call for consumer in expanded.consumers() for call in consumer.calls):
            inputs = TreeInputs.from_layout(layout)
            source_T = torch.empty(layout.num_rows, dtype=torch.int64)
            source_T[layout.row_of_position_S] = layout.source_position_S
            (from_call,) = set(call_S[source_T].tolist())  # calls of one consumer: its one compact call
            for core, (*parts, o_THV) in zip(cores, result.cores[from_call], strict=True):
                repeated = core(*(p[row_S[source_T]] for p in parts), inputs)
                different += int((repeated != o_THV[row_S[source_T]]).flatten(1).any(1).sum())
    return different
