"""A model outside the package: causal attention over the rows of a plan, no linear attention, no experts.

Everything ``harts_titan`` asks of a model is here: see docs/extending.md. Run it from the checkout with

    PYTHONPATH=docs/examples ./run_train.sh docs/examples/tiny_attention.toml

Letters: T compact rows, D model dimension, H heads, K head dimension.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import build_optimizers
from torchtitan.protocols.model import BaseModelArgs, ModelProtocol
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec

from harts_titan.models.common.feed_forward import FeedForward
from harts_titan.models.common.lm_head import LMHead
from harts_titan.models.common.no_loss import build_no_loss
from harts_titan.models.common.norm import RMSNorm
from harts_titan.models.common.rope import apply_rope, rope_tables
from harts_titan.models.common.tree_inputs import TreeInputs
from harts_titan.models.train_specs import HuggingFaceFormat, build_dataloader, register_hugging_face
from harts_titan.ops.attention import tree_attention
from harts_titan.parallel.fsdp import shard_model
from harts_titan.parallel.sharding import copy_from_full_

NAME = "tiny_attention"


@dataclass
class TinyArgs(BaseModelArgs):
    """Sizes; every field needs a default."""

    dim: int = 32
    n_layers: int = 2
    n_heads: int = 4
    vocab_size: int = 512
    rope_theta: float = 1e4

    def update_from_config(self, job_config: Any, **kwargs: Any) -> None:
        """Take nothing from the job; a place to check the sizes against it."""

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, float]:
        """Return parameters, and operations of forward and backward per token, for the trainer's log."""
        count = sum(p.numel() for p in model.parameters())
        return count, 6 * (count - self.vocab_size * self.dim) + 6 * self.n_layers * self.dim * seq_len


class Block(nn.Module):
    """Attention and feed-forward, both pre-normed and residual."""

    def __init__(self, args: TinyArgs) -> None:
        super().__init__()
        self.head_dim = args.dim // args.n_heads
        self.attention_norm = RMSNorm(args.dim, eps=1e-6)
        self.qkv = nn.Linear(args.dim, 3 * args.dim, bias=False)
        self.out = nn.Linear(args.dim, args.dim, bias=False)
        self.ffn_norm = RMSNorm(args.dim, eps=1e-6)
        self.feed_forward = FeedForward(args.dim, 4 * args.dim)

    def forward(self, x_TD: Tensor, inputs: TreeInputs, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Return (T, D)."""
        q_THK, k_THK, v_THK = self.qkv(self.attention_norm(x_TD)).unflatten(1, (3, -1, self.head_dim)).unbind(1)
        o_THK = tree_attention(
            apply_rope(q_THK, *rope),
            apply_rope(k_THK, *rope),
            v_THK,
            inputs.attention,
            scale=self.head_dim**-0.5,
            backend=inputs.backends.attention,
        )
        x_TD = x_TD + self.out(o_THK.flatten(1))
        return x_TD + self.feed_forward(self.ffn_norm(x_TD))


class TinyOutput(NamedTuple):
    """What ``forward`` must return: log-probs of positions, entropies of rows, one router output per MoE layer."""

    logprob_S: Tensor
    entropy_T: Tensor
    router: tuple[Any, ...] = ()


class TinyAttention(ModelProtocol):
    """Every distinct prefix of a call is one row; the plan's tables say which rows are its ancestors."""

    def __init__(self, model_args: TinyArgs) -> None:
        super().__init__(model_args)
        self.model_args = model_args
        self.tok_embeddings = nn.Embedding(model_args.vocab_size, model_args.dim)
        self.layers = nn.ModuleDict({str(i): Block(model_args) for i in range(model_args.n_layers)})
        self.norm = RMSNorm(model_args.dim, eps=1e-6)
        self.output = LMHead(model_args.dim, model_args.vocab_size, rows_per_chunk=1024)

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Fill every parameter from ``torch.initial_seed()``; whole tensors are drawn, so sharding changes nothing."""
        generator = torch.Generator().manual_seed(torch.initial_seed())
        for name, parameter in self.named_parameters():
            value = torch.ones(parameter.shape)
            if not name.endswith("norm.weight"):
                value = torch.randn(parameter.shape, generator=generator) * 0.02
            copy_from_full_(parameter, value)

    def forward(self, inputs: TreeInputs) -> TinyOutput:
        """Run one call of a plan."""
        x_TD = self.tok_embeddings(inputs.token_T)
        # Absolute positions in the trajectory; the place of a row in memory means nothing.
        rope = rope_tables(
            inputs.position_T,
            dim=self.model_args.dim // self.model_args.n_heads,
            theta=self.model_args.rope_theta,
            dtype=x_TD.dtype,
        )
        for layer in self.layers.values():
            x_TD = layer(x_TD, inputs, rope)
        head = self.output(self.norm(x_TD), inputs.row_of_position_S, inputs.label_S)
        return TinyOutput(head.logprob_S, head.entropy_T)


def parallelize(model: nn.Module, parallel_dims: Any, job_config: Any) -> nn.Module:
    """Shard over the data-parallel ranks; ``job_config.validate`` has refused every other kind of parallelism."""
    if job_config.activation_checkpoint.mode != "none":
        raise ValueError(f"activation_checkpoint.mode = {job_config.activation_checkpoint.mode!r}; this model has none")
    if job_config.compile.enable:
        raise ValueError("compile.enable = True: this model is not compiled")
    if job_config.training.mixed_precision_param != job_config.training.dtype:
        raise ValueError("this model computes in training.dtype; set training.mixed_precision_param to the same")
    if parallel_dims.dp_shard > 1:
        dtype = getattr(torch, job_config.training.dtype)
        shard_model(model, parallel_dims.get_mesh("fsdp"), param_dtype=dtype, reduce_dtype=dtype)
    return model


def read_args(config_json: str | Path) -> TinyArgs:
    """Sizes from a ``config.json``; for ``--hf-dir``."""
    return TinyArgs(**json.loads(Path(config_json).read_text()))


def load(model: nn.Module, args: TinyArgs, folder: str | Path) -> None:
    """Fill the model from a folder of safetensors; for ``--hf-dir``."""
    tensors = load_file(Path(folder) / "model.safetensors")
    for name, parameter in model.named_parameters():
        copy_from_full_(parameter, tensors[name])


register_train_spec(
    NAME,
    TrainSpec(
        model_cls=TinyAttention,
        model_args={"tiny": TinyArgs()},
        parallelize_fn=parallelize,
        pipelining_fn=None,
        build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=build_lr_schedulers,
        build_dataloader_fn=build_dataloader,
        build_tokenizer_fn=None,
        build_loss_fn=build_no_loss,
    ),
)
register_hugging_face(NAME, HuggingFaceFormat(read_args, load))
