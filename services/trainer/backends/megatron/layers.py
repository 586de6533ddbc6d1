"""The transformer layer: Megatron's own modules on a CPU, Transformer Engine's with CUDA."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor, nn

from services.trainer.backends.megatron import cpu
from services.trainer.backends.megatron.attention import PlannedAttention
from services.trainer.backends.megatron.families import Architecture
from trireme.config.model_features import GELU_TANH, SILU


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32, times weight (1 + weight where the configuration centres gains at zero); under
    sequence parallelism Megatron sums its gradient over the ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps, self.centred = eps, config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return _RMSNorm.apply(x, self.weight + 1 if self.centred else self.weight, self.eps)
        wide = x.float()
        if self.centred:  # rounded once, as these models do it
            return _RMSNorm.apply(wide, self.weight.float() + 1, self.eps).to(x.dtype)
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """The same with half of the passes over memory, which is what it costs on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        scale = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        product = (grad * x).flatten(0, -2)
        grad_weight = torch.mv(product.t(), scale.flatten())
        # d scale / d x = -x scale^3 / width
        along = torch.mv(product, weight).view_as(scale).mul_(scale.pow(3)).div_(-x.shape[-1])
        return (grad * weight).mul_(scale).addcmul_(x, along), grad_weight, None


# Where Megatron would place Transformer Engine's.
class SwiGLU(MegatronModule):
    """silu(gate) * up of [..., gate | up]."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return nn.functional.silu(gate) * up


class GeGLU(MegatronModule):
    """gelu(gate) * up of [..., gate | up], in the tanh approximation."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return nn.functional.gelu(gate, approximate="tanh") * up


# Megatron's name of an activation, and the module here.
ACTIVATIONS = {SILU: (nn.functional.silu, SwiGLU), GELU_TANH: (nn.functional.gelu, GeGLU)}


# Megatron has one switch for the biases of attention and MLP: where only one has them, the other is built of these.
class UnbiasedColumn(ColumnParallelLinear):
    """A column-parallel linear layer without a bias, whatever the configuration says."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "bias": False})


class UnbiasedRow(RowParallelLinear):
    """A row-parallel linear layer without a bias, whatever the configuration says."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "bias": False})


class NormedRow(UnbiasedRow):
    """A row-parallel linear layer whose result is normalised."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.post_layernorm = RMSNorm(config, output_size, config.layernorm_epsilon)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        result, bias = super().forward(x)
        return self.post_layernorm(result), bias


def block_spec(config: TransformerConfig, architecture: Architecture, stage: int | None) -> Any:
    """What Megatron's transformer block is built from on this machine. stage: of a virtual pipeline."""
    if not cpu.active():
        return _transformer_engine_spec(config, architecture, stage)
    first = get_transformer_layer_offset(config, vp_stage=stage)
    own = range(first, first + get_num_layers_to_build(config, vp_stage=stage))
    layers = [_local_layer(config, architecture, layer) for layer in own]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _transformer_engine_spec(config: TransformerConfig, architecture: Architecture, stage: int | None) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    if architecture.biases.projection != architecture.biases.mlp:
        raise ValueError("attention_bias and mlp_bias must agree with Transformer Engine")
    if architecture.post_norms:
        raise ValueError(f"{architecture.name} is not supported with Transformer Engine, only on a CPU")
    return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=stage)


def _local_layer(config: TransformerConfig, architecture: Architecture, layer: int) -> ModuleSpec:
    experts = architecture.experts
    submodules = TransformerLayerSubmodules(
        input_layernorm=RMSNorm,
        self_attention=_self_attention(config, architecture, layer),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=RMSNorm,
        mlp=_experts() if experts and experts.layers[layer] else _mlp(architecture),
        mlp_bda=get_bias_dropout_add,
    )
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def _self_attention(config: TransformerConfig, architecture: Architecture, layer: int) -> ModuleSpec:
    norm = RMSNorm if config.qk_layernorm else IdentityOp
    windowed = architecture.window is not None and bool(architecture.window.layers[layer])
    submodules = SelfAttentionSubmodules(
        linear_qkv=_column(architecture.biases.qkv),
        core_attention=ModuleSpec(module=PlannedAttention, params={"windowed": windowed}),
        linear_proj=_row(architecture, architecture.biases.projection),
        q_layernorm=norm,
        k_layernorm=norm,
    )
    return ModuleSpec(module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=submodules)


def _column(bias: bool) -> type:
    return ColumnParallelLinear if bias else UnbiasedColumn


def _row(architecture: Architecture, bias: bool) -> type:
    if architecture.post_norms:
        return NormedRow
    return RowParallelLinear if bias else UnbiasedRow


def _mlp(architecture: Architecture) -> ModuleSpec:
    column, row = _column(architecture.biases.mlp), _row(architecture, architecture.biases.mlp)
    activation = ACTIVATIONS[architecture.activation][1]
    return ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row, activation_func=activation)
    )


def _experts() -> ModuleSpec:
    each = MLPSubmodules(linear_fc1=UnbiasedColumn, linear_fc2=UnbiasedRow, activation_func=SwiGLU)
    experts = ModuleSpec(module=SequentialMLP, submodules=each)
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts))
