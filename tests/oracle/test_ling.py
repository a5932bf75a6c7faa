"""The oracle is checked where something outside this repository says what is right."""

from __future__ import annotations

import math

import pytest
import torch

from tests.oracle import ling

TINY = {
    "hidden_size": 1536,
    "num_hidden_layers": 24,
    "layer_group_size": 4,
    "num_attention_heads": 16,
    "head_dim": 128,
    "short_conv_kernel_size": 4,
    "kda_lower_bound": -5.0,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_theta": 6e6,
    "rms_norm_eps": 1e-6,
    "intermediate_size": 4608,
    "first_k_dense_replace": 1,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 512,
    "num_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 512,
    "vocab_size": 157184,
}
FLASH = {
    **TINY,
    "hidden_size": 2560,
    "num_hidden_layers": 42,
    "layer_group_size": 6,
    "num_attention_heads": 32,
    "q_lora_rank": None,
    "intermediate_size": 6144,
    "first_k_dense_replace": 2,
    "num_experts": 512,
    "moe_intermediate_size": 768,
    "moe_shared_expert_intermediate_size": 768,
}


@pytest.mark.parametrize(("config", "count"), [(TINY, 7_893_392_800), (FLASH, 124_414_211_552)])
def test_tensors_of_the_checkpoint_add_up_to_the_published_counts(config, count):
    assert sum(math.prod(shape) for shape in ling.weight_shapes(config).values()) == count


def test_mla_layers_are_the_published_ones():
    assert [i for i in range(24) if ling.is_mla_layer(TINY, i)] == [3, 7, 11, 15, 19, 23]
    assert [i for i in range(42) if ling.is_mla_layer(FLASH, i)] == [5, 11, 17, 23, 29, 35, 41]
    odd = {"layer_group_size": 3, "num_hidden_layers": 5}  # what is left after the last full group is MLA
    assert [i for i in range(5) if ling.is_mla_layer(odd, i)] == [2, 3, 4]


def test_kda_recurrence_equals_flash_linear_attention():
    naive = pytest.importorskip("fla.ops.kda.naive", reason="needs fla-core")
    generator = torch.Generator().manual_seed(0)
    q, k, v, gate = (torch.randn(37, 3, 8, generator=generator) for _ in range(4))
    q, k, log_decay = ling.l2_norm(q) * 8**-0.5, ling.l2_norm(k), -5 * torch.sigmoid(gate - 5)
    beta = torch.rand(37, 3, generator=generator)
    theirs, _ = naive.naive_recurrent_kda(*(x.unsqueeze(0) for x in (q, k, v, log_decay, beta)), scale=1.0)
    ours = ling.kda_recurrence(*(x.double() for x in (q, k, v, log_decay, beta)))
    torch.testing.assert_close(theirs.squeeze(0), ours.float(), rtol=1e-5, atol=1e-5)


def test_rotary_scores_depend_on_the_distance_only():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(8, generator=generator, dtype=torch.float64) for _ in range(2))

    def score(i: int, j: int) -> float:
        return float(ling.rope_interleaved(q, i, 6e6) @ ling.rope_interleaved(k, j, 6e6))

    assert abs(score(7, 4) - score(103, 100)) < 1e-12
    assert abs(score(7, 4) - score(7, 5)) > 1e-3
    torch.testing.assert_close(ling.rope_interleaved(q, 0, 6e6), q)


def test_experts_come_from_the_best_groups_and_ties_go_to_the_lower_index():
    config = {"num_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
    zero = [0.0] * 8
    # Group sums 0.9, 1.0, 1.1, 0.2: the best single expert (index 0) lies in a group that loses.
    assert ling.choose_experts([0.9, 0.0, 0.5, 0.5, 0.6, 0.5, 0.1, 0.1], zero, config) == [4, 2, 3]
    assert ling.choose_experts([0.5] * 8, zero, config) == [0, 1, 2]
    assert ling.choose_experts([0.5] * 8, [0, 0, 0, 0, 0, 0, 0, 0.1], config) == [7, 0, 1]


def test_log_probabilities_are_those_of_the_next_token():
    config = {
        **TINY,
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "layer_group_size": 2,
        "num_attention_heads": 2,
        "head_dim": 8,
        "q_lora_rank": 6,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "intermediate_size": 16,
        "num_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "moe_shared_expert_intermediate_size": 8,
        "vocab_size": 11,
    }
    weights = ling.random_weights(config, 0)
    whole = ling.forward([7, 8, 9, 4], weights, config)
    expected = [torch.log_softmax(whole.logits_LW[i], -1)[t] for i, t in enumerate([8, 9, 4])]
    torch.testing.assert_close(whole.logprob_L, torch.stack([*expected, torch.zeros((), dtype=torch.float64)]))
    # Later tokens change nothing before them.
    torch.testing.assert_close(ling.forward([7, 8], weights, config).logits_LW, whole.logits_LW[:2], rtol=0, atol=1e-13)
