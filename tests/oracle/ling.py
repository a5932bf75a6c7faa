"""A naive float64 Ling-3.0: one trajectory at a time, one token at a time.

It imports nothing of the package under test. Everything is written from the published description of the model: plain
torch, Python loops over tokens, layers, chosen experts and visible tokens, autograd for the gradients. Nothing is
shared between trajectories, nothing is chunked, nothing is packed. Weights are a dict with the names of the Hugging
Face checkpoint, the configuration is a dict with the fields of ``config.json``. A map that treats every token alike (a
projection, a norm) is applied to all tokens of a trajectory at once.

Dimension letters: L tokens of one trajectory, D model, H heads, K key head dim, V value head dim, E experts,
W vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

Weights = dict[str, torch.Tensor]
Config = dict[str, object]


def is_mla_layer(config: Config, layer: int) -> bool:
    group, layers = config["layer_group_size"], config["num_hidden_layers"]
    return (layer + 1) % group == 0 or layer >= layers // group * group


def is_moe_layer(config: Config, layer: int) -> bool:
    return layer >= config["first_k_dense_replace"]


def weight_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the checkpoint, by its checkpoint name."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kda_dim, taps = config["head_dim"], config["short_conv_kernel_size"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.word_embeddings.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }

    def feed_forward(prefix: str, width: int) -> None:
        shapes[f"{prefix}.gate_proj.weight"] = (width, hidden)
        shapes[f"{prefix}.up_proj.weight"] = (width, hidden)
        shapes[f"{prefix}.down_proj.weight"] = (hidden, width)

    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}"
        shapes[f"{base}.input_layernorm.weight"] = (hidden,)
        shapes[f"{base}.post_attention_layernorm.weight"] = (hidden,)
        attn = f"{base}.attention"
        if is_mla_layer(config, layer):
            if q_rank is None:
                shapes[f"{attn}.q_proj.weight"] = (heads * (nope + rope), hidden)
            else:
                shapes[f"{attn}.q_a_proj.weight"] = (q_rank, hidden)
                shapes[f"{attn}.q_a_layernorm.weight"] = (q_rank,)
                shapes[f"{attn}.q_b_proj.weight"] = (heads * (nope + rope), q_rank)
            shapes[f"{attn}.kv_a_proj_with_mqa.weight"] = (kv_rank + rope, hidden)
            shapes[f"{attn}.kv_a_layernorm.weight"] = (kv_rank,)
            shapes[f"{attn}.kv_b_proj.weight"] = (heads * (nope + value), kv_rank)
            shapes[f"{attn}.g_proj.weight"] = (heads, hidden)
            shapes[f"{attn}.dense.weight"] = (hidden, heads * value)
        else:
            for name in ("q", "k", "v", "f", "g"):
                shapes[f"{attn}.{name}_proj.weight"] = (heads * kda_dim, hidden)
            shapes[f"{attn}.b_proj.weight"] = (heads, hidden)
            shapes[f"{attn}.o_proj.weight"] = (hidden, heads * kda_dim)
            for name in ("q", "k", "v"):
                shapes[f"{attn}.{name}_conv1d.weight"] = (heads * kda_dim, 1, taps)
            shapes[f"{attn}.A_log"] = (heads,)
            shapes[f"{attn}.dt_bias"] = (heads * kda_dim,)
            shapes[f"{attn}.o_norm.weight"] = (kda_dim,)
        if is_moe_layer(config, layer):
            shapes[f"{base}.mlp.gate.weight"] = (config["num_experts"], hidden)
            shapes[f"{base}.mlp.gate.expert_bias"] = (config["num_experts"],)
            for expert in range(config["num_experts"]):
                feed_forward(f"{base}.mlp.experts.{expert}", config["moe_intermediate_size"])
            width = config["moe_shared_expert_intermediate_size"] * config["num_shared_experts"]
            feed_forward(f"{base}.mlp.shared_experts", width)
        else:
            feed_forward(f"{base}.mlp", config["intermediate_size"])
    return shapes


def random_weights(config: Config, seed: int, *, decay: float | None = None, decay_spread: float = 0.1) -> Weights:
    """Return random float64 weights.

    ``decay`` sets the KDA gates so that a state channel decays by about ``exp(-decay)`` a token: with the fast decay of
    a plain random initialisation a leaked state fades below rounding within a few tokens and no test would see it.
    ``decay_spread`` is the scale of the part of the gate that depends on the token.
    """
    generator = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for name, shape in weight_shapes(config).items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name.endswith("norm.weight"):
            weights[name] = 1.0 + 0.1 * noise
        elif name.endswith("word_embeddings.weight"):
            weights[name] = noise
        elif name.endswith("expert_bias"):
            weights[name] = (0.05 * noise).float().double()  # published in float32, kept in float32
        elif name.endswith("A_log"):
            weights[name] = 0.3 * noise
        elif name.endswith("dt_bias"):
            weights[name] = noise
        elif name.endswith("conv1d.weight"):
            weights[name] = noise / math.sqrt(shape[-1])
        else:
            weights[name] = noise / math.sqrt(shape[-1])
    if decay is not None:
        slow_decay_(weights, config, decay=decay, spread=decay_spread)
    return weights


def slow_decay_(weights: Weights, config: Config, *, decay: float = 0.01, spread: float = 0.1) -> None:
    """Set the KDA gates in place so that the log decay of a token is about ``-decay`` whatever the token."""
    fraction = decay / abs(config["kda_lower_bound"])
    logit = math.log(fraction / (1.0 - fraction))
    for name in weights:
        if name.endswith("dt_bias"):
            speed = torch.exp(weights[name.replace("dt_bias", "A_log")]).repeat_interleave(config["head_dim"])
            weights[name] = logit / speed + spread * weights[name]
        elif name.endswith("f_proj.weight"):
            weights[name] = spread * weights[name]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def l2_norm(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def short_conv(x_LD: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Causal depthwise convolution: the last tap is the current token, what lies before the trajectory is zero."""
    taps = weight.shape[-1]
    rows = []
    for t in range(x_LD.shape[0]):
        total = torch.zeros_like(x_LD[0])
        for tap in range(taps):
            source = t - (taps - 1) + tap
            if source >= 0:
                total = total + weight[:, 0, tap] * x_LD[source]
        rows.append(silu(total))
    return torch.stack(rows)


def kda_recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """One state matrix (K, V) per head: decay each key channel, then write the error of what the key recalls.

    q, k, log_decay are (L, H, K), v is (L, H, V), beta is (L, H); q is normalised and scaled, k is normalised.
    """
    state = torch.zeros(*k.shape[1:], v.shape[-1], dtype=v.dtype)
    outputs = []
    for t in range(q.shape[0]):
        state = torch.exp(log_decay[t]).unsqueeze(-1) * state
        recalled = torch.einsum("hk,hkv->hv", k[t], state)
        correction = beta[t].unsqueeze(-1) * (v[t] - recalled)
        state = state + torch.einsum("hk,hv->hkv", k[t], correction)
        outputs.append(torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(outputs)


def kda_layer(x_LD: torch.Tensor, weights: Weights, attn: str, config: Config) -> torch.Tensor:
    """Kimi Delta Attention with the safe gate and a sigmoid output gate per channel."""
    heads, dim = config["num_attention_heads"], config["head_dim"]
    length = x_LD.shape[0]
    q, k, v = (
        short_conv(x_LD @ weights[f"{attn}.{n}_proj.weight"].T, weights[f"{attn}.{n}_conv1d.weight"]).reshape(
            length, heads, dim
        )
        for n in ("q", "k", "v")
    )
    q, k = l2_norm(q) * dim**-0.5, l2_norm(k)
    raw_gate = x_LD @ weights[f"{attn}.f_proj.weight"].T + weights[f"{attn}.dt_bias"]
    speed = torch.exp(weights[f"{attn}.A_log"]).reshape(heads, 1)
    log_decay = config["kda_lower_bound"] * torch.sigmoid(speed * raw_gate.reshape(length, heads, dim))
    beta = torch.sigmoid(x_LD @ weights[f"{attn}.b_proj.weight"].T)  # (L, H)
    outputs = kda_recurrence(q, k, v, log_decay, beta)
    o = rms_norm(outputs, weights[f"{attn}.o_norm.weight"], config["rms_norm_eps"])
    gate = torch.sigmoid(x_LD @ weights[f"{attn}.g_proj.weight"].T).reshape(length, heads, dim)
    return (o * gate).reshape(length, heads * dim) @ weights[f"{attn}.o_proj.weight"].T


def rope_interleaved(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """Rotate the pairs (0, 1), (2, 3), ... of the last dimension by ``position * theta^(-2j/dim)``."""
    dim = x.shape[-1]
    out = []
    for j in range(dim // 2):
        angle = position * theta ** (-2.0 * j / dim)
        even, odd = x[..., 2 * j], x[..., 2 * j + 1]
        out.append(even * math.cos(angle) - odd * math.sin(angle))
        out.append(even * math.sin(angle) + odd * math.cos(angle))
    return torch.stack(out, dim=-1)


def mla_layer(x_LD: torch.Tensor, weights: Weights, attn: str, config: Config) -> torch.Tensor:
    """Multi-head latent attention with a sigmoid output gate per head; a token sees itself and all tokens before it."""
    heads, length, eps = config["num_attention_heads"], x_LD.shape[0], config["rms_norm_eps"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    rank, theta = config["kv_lora_rank"], config["rope_theta"]
    if config["q_lora_rank"] is None:
        q = x_LD @ weights[f"{attn}.q_proj.weight"].T
    else:
        q_latent = rms_norm(x_LD @ weights[f"{attn}.q_a_proj.weight"].T, weights[f"{attn}.q_a_layernorm.weight"], eps)
        q = q_latent @ weights[f"{attn}.q_b_proj.weight"].T
    q = q.reshape(length, heads, nope + rope)
    kv_a = x_LD @ weights[f"{attn}.kv_a_proj_with_mqa.weight"].T
    latent = rms_norm(kv_a[:, :rank], weights[f"{attn}.kv_a_layernorm.weight"], eps)
    kv = (latent @ weights[f"{attn}.kv_b_proj.weight"].T).reshape(length, heads, nope + value)
    queries, keys, values = [], [], []
    for t in range(length):
        q_rope = rope_interleaved(q[t, :, nope:], t, theta)
        k_rope = rope_interleaved(kv_a[t, rank:], t, theta)  # one key for all heads
        queries.append(torch.cat([q[t, :, :nope], q_rope], dim=-1))
        keys.append(torch.cat([kv[t, :, :nope], k_rope.unsqueeze(0).expand(heads, rope)], dim=-1))
        values.append(kv[t, :, nope:])
    scale = (nope + rope) ** -0.5
    outputs = []
    for t in range(length):
        visible_keys = torch.stack(keys[: t + 1])  # (t + 1, H, K)
        visible_values = torch.stack(values[: t + 1])
        scores = torch.einsum("hk,shk->sh", queries[t], visible_keys) * scale
        exps = torch.exp(scores - scores.max(dim=0).values.detach())
        probabilities = exps / exps.sum(dim=0)
        outputs.append(torch.einsum("sh,shv->hv", probabilities, visible_values))
    gate = torch.sigmoid(x_LD @ weights[f"{attn}.g_proj.weight"].T)  # (L, H)
    o = torch.stack(outputs) * gate.unsqueeze(-1)
    return o.reshape(length, heads * value) @ weights[f"{attn}.dense.weight"].T


def swiglu(x: torch.Tensor, weights: Weights, prefix: str, limit: float | None = None) -> torch.Tensor:
    gate = silu(x @ weights[f"{prefix}.gate_proj.weight"].T)
    up = x @ weights[f"{prefix}.up_proj.weight"].T
    if limit:
        gate = gate.clamp(max=limit)
        up = up.clamp(-limit, limit)
    return (gate * up) @ weights[f"{prefix}.down_proj.weight"].T


def choose_experts(scores: list[float], bias: list[float], config: Config) -> list[int]:
    """Group-limited top-k of one token on ``score + bias``; a tie goes to the lower index. Best expert first."""
    num_experts, num_groups = config["num_experts"], config["n_group"]
    size = num_experts // num_groups
    biased = [s + b for s, b in zip(scores, bias)]
    group_score = []
    for group in range(num_groups):
        members = sorted(biased[group * size : (group + 1) * size], reverse=True)
        group_score.append(sum(members[:2]))
    groups = sorted(range(num_groups), key=lambda g: (-group_score[g], g))[: config["topk_group"]]
    allowed = [e for g in groups for e in range(g * size, (g + 1) * size)]
    return sorted(allowed, key=lambda e: (-biased[e], e))[: config["num_experts_per_tok"]]


def swiglu_limit(config: Config, field: str, layer: int) -> float | None:
    limits = config.get(field)
    return None if limits is None or not limits[layer] else float(limits[layer])


def moe_layer(
    x_LD: torch.Tensor, weights: Weights, mlp: str, config: Config, layer: int
) -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
    """Return the output, the router logits (L, E) and the chosen experts of every token."""
    logits_LE = x_LD @ weights[f"{mlp}.gate.weight"].T
    scores_LE = torch.sigmoid(logits_LE)
    bias = weights[f"{mlp}.gate.expert_bias"].tolist()
    routed_limit = swiglu_limit(config, "expert_swiglu_limit_list", layer)
    shared_limit = swiglu_limit(config, "share_expert_swiglu_limit_list", layer)
    rows, chosen_rows = [], []
    for t in range(x_LD.shape[0]):
        chosen = choose_experts(scores_LE[t].tolist(), bias, config)
        total = sum(scores_LE[t, e] for e in chosen) + 1e-20
        out = torch.zeros_like(x_LD[t])
        for e in chosen:
            weight = scores_LE[t, e] / total * config["routed_scaling_factor"]
            out = out + weight * swiglu(x_LD[t], weights, f"{mlp}.experts.{e}", routed_limit)
        rows.append(out + swiglu(x_LD[t], weights, f"{mlp}.shared_experts", shared_limit))
        chosen_rows.append(chosen)
    return torch.stack(rows), logits_LE, chosen_rows


@dataclass
class TrajectoryOutput:
    """What the model says of one trajectory of L tokens; the router lists have one entry per MoE layer."""

    logits_LW: torch.Tensor
    logprob_L: torch.Tensor  # of the next token; the last position has none and holds 0
    entropy_L: torch.Tensor
    router_logits: list[torch.Tensor]  # (L, E) each
    topk: list[list[list[int]]]


def forward(tokens: list[int], weights: Weights, config: Config) -> TrajectoryOutput:
    eps = config["rms_norm_eps"]
    x = torch.stack([weights["model.word_embeddings.weight"][token] for token in tokens])
    router_logits, topk = [], []
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}"
        attention = mla_layer if is_mla_layer(config, layer) else kda_layer
        normed = rms_norm(x, weights[f"{base}.input_layernorm.weight"], eps)
        x = x + attention(normed, weights, f"{base}.attention", config)
        normed = rms_norm(x, weights[f"{base}.post_attention_layernorm.weight"], eps)
        if is_moe_layer(config, layer):
            out, logits, chosen = moe_layer(normed, weights, f"{base}.mlp", config, layer)
            router_logits.append(logits)
            topk.append(chosen)
        else:
            out = swiglu(normed, weights, f"{base}.mlp")
        x = x + out
    logits_LW = rms_norm(x, weights["model.norm.weight"], eps) @ weights["lm_head.weight"].T
    log_probs_LW = logits_LW - torch.logsumexp(logits_LW, dim=-1, keepdim=True)
    entropy_L = -(torch.exp(log_probs_LW) * log_probs_LW).sum(-1)
    picked = [log_probs_LW[t, tokens[t + 1]] for t in range(len(tokens) - 1)]
    logprob_L = torch.stack([*picked, torch.zeros((), dtype=x.dtype)])
    return TrajectoryOutput(logits_LW, logprob_L, entropy_L, router_logits, topk)


def z_loss(outputs: list[TrajectoryOutput]) -> torch.Tensor:
    """Mean over all positions of logsumexp(router logits)^2, summed over the MoE layers."""
    total = torch.zeros((), dtype=torch.float64)
    for layer in range(len(outputs[0].router_logits)):
        logits = torch.cat([o.router_logits[layer] for o in outputs])
        total = total + (torch.logsumexp(logits, dim=-1) ** 2).mean()
    return total


def expert_counts(outputs: list[TrajectoryOutput], config: Config) -> list[list[int]]:
    """Return for each MoE layer how many positions chose each expert."""
    counts = [[0] * config["num_experts"] for _ in outputs[0].topk]
    for output in outputs:
        for layer, rows in enumerate(output.topk):
            for chosen in rows:
                for expert in chosen:
                    counts[layer][expert] += 1
    return counts


def load_balance_loss(outputs: list[TrajectoryOutput], config: Config) -> torch.Tensor:
    """E / (A S) * sum_e count_e * P_e over the positions of all given trajectories, summed over the MoE layers."""
    counts = expert_counts(outputs, config)
    total = torch.zeros((), dtype=torch.float64)
    for layer in range(len(counts)):
        scores = torch.sigmoid(torch.cat([o.router_logits[layer] for o in outputs]))
        probability_E = (scores / scores.sum(-1, keepdim=True)).mean(0)
        count_E = torch.tensor(counts[layer], dtype=torch.float64)
        factor = config["num_experts"] / (config["num_experts_per_tok"] * scores.shape[0])
        total = total + factor * (count_E * probability_E).sum()
    return total


def load_balance_loss_per_trajectory(outputs: list[TrajectoryOutput], config: Config) -> torch.Tensor:
    """Mean of the trajectories' own load-balance losses, weighted by their lengths."""
    positions = sum(o.logits_LW.shape[0] for o in outputs)
    total = torch.zeros((), dtype=torch.float64)
    for output in outputs:
        total = total + output.logits_LW.shape[0] / positions * load_balance_loss([output], config)
    return total
