"""An architecture as a Megatron model: Megatron's configuration of it, and the module."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from services.trainer.backends.megatron import cpu, layers
from services.trainer.backends.megatron.attention import Angles, PlannedSeqParams, make_plan
from services.trainer.backends.megatron.context import Part
from services.trainer.backends.megatron.families import Architecture, Experts
from services.trainer.backends.megatron.layout import Layout
from services.trainer.backends.megatron.settings import Settings
from trireme.config.model_rules import padded_vocab_size


def _leave(weight: Tensor) -> None:
    """Initialise nothing: every weight is read from the model folder, and loading checks that it was."""


def transformer_config(architecture: Architecture, settings: Settings) -> TransformerConfig:
    """Megatron's configuration of the model, for this machine and layout."""
    hf, on_cpu, dtype, parallel = architecture.hf, cpu.active(), settings.dtype, settings.parallel
    experts = _experts(architecture.experts, settings) if architecture.experts else {}
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=architecture.head_dim,
        ffn_hidden_size=hf.intermediate_size,
        layernorm_epsilon=hf.rms_norm_eps,
        normalization="RMSNorm",
        qk_layernorm=architecture.qk_norm,
        gated_linear_unit=True,
        activation_func=layers.ACTIVATIONS[architecture.activation][0],
        layernorm_zero_centered_gamma=architecture.centred_norms,
        softmax_scale=architecture.softmax_scale,
        add_bias_linear=architecture.biases.projection or architecture.biases.mlp,
        add_qkv_bias=architecture.biases.qkv,
        # Policy gradients compare log-probs of two passes: dropout would tell them apart.
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # Losses are divided by the whole batch's tokens beforehand: gradients over ranks are summed, not averaged.
        calculate_per_token_loss=True,
        # Left on although nothing is initialised: it marks the weights as split over tensor-parallel ranks.
        perform_initialization=True,
        init_method=_leave,
        output_layer_init_method=_leave,
        use_cpu_initialization=on_cpu,
        gradient_accumulation_fusion=on_cpu,
        use_te_activation_func=on_cpu,
        apply_rope_fusion=settings.rope_fusion and not on_cpu,
        bias_dropout_fusion=not on_cpu,
        recompute_granularity="full" if settings.recompute else None,
        recompute_method="uniform" if settings.recompute else None,
        recompute_num_layers=1 if settings.recompute else None,
        tensor_model_parallel_size=parallel.tensor,
        sequence_parallel=parallel.sequence,
        context_parallel_size=parallel.context,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual if parallel.virtual > 1 else None,
        num_layers_in_first_pipeline_stage=parallel.first_stage,
        num_layers_in_last_pipeline_stage=parallel.last_stage,
        variable_seq_lengths=parallel.pipeline > 1,  # no two micro-batches have as many tokens
        deallocate_pipeline_outputs=True,
        # Between two stages, batched messages of an interleaved schedule would meet the wrong receiver.
        overlap_p2p_comm=parallel.virtual > 1,
        batch_p2p_comm=parallel.virtual == 1,
        moe_token_dispatcher_type="alltoall",  # another one refuses variable lengths even where it is not used
        **experts,
    )


def _experts(experts: Experts, settings: Settings) -> dict[str, Any]:
    """A mixture of experts as Megatron's options."""
    return {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.chosen,
        "moe_ffn_hidden_size": experts.width,
        "moe_layer_freq": list(experts.layers),
        # Softmax over the chosen, or over all of which the chosen are then not renormalised.
        "moe_router_pre_softmax": not experts.renormalise,
        "moe_router_dtype": settings.router.dtype,
        "moe_router_load_balancing_type": "none",
        "expert_model_parallel_size": settings.parallel.expert,
        "expert_tensor_parallel_size": settings.parallel.expert_tensor,
        "moe_grouped_gemm": not cpu.active(),
    }


class PolicyModel(GPTModel):
    """Megatron's GPT whose last stage returns hidden states: the caller applies the output layer where it matters.

    stage: which of this rank's virtual pipeline stages it is, None where there is one.
    """

    def __init__(self, architecture: Architecture, config: TransformerConfig, stage: int | None = None) -> None:
        at = {"ignore_virtual": False, "vp_stage": stage}
        super().__init__(
            config,
            layers.block_spec(config, architecture, stage),
            pre_process=parallel_state.is_pipeline_first_stage(**at),
            post_process=parallel_state.is_pipeline_last_stage(**at),
            vp_stage=stage,
            vocab_size=padded_vocab_size(architecture.hf.vocab_size, config.tensor_model_parallel_size),
            max_sequence_length=architecture.hf.max_position_embeddings,
            share_embeddings_and_output_weights=architecture.tied,
            # Without Transformer Engine the core attention rotates by explicit positions.
            position_embedding_type="none" if cpu.active() else "rope",
        )
        self.vocab_size = architecture.hf.vocab_size  # without the padding
        self.window = architecture.window.size if architecture.window else None
        if self.pre_process and architecture.embedding_scale != 1:
            # Rounded to the weights' precision, as Hugging Face does it.
            scale = torch.tensor(architecture.embedding_scale).to(config.params_dtype).item()
            self.embedding.register_forward_hook(lambda module, args, output: output * scale)
        inv_freq, self.rope_scale = _rope(architecture.hf, "full_attention")
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        if self.window is not None:
            window_inv_freq, self.window_rope_scale = _rope(architecture.hf, "sliding_attention")
            self.register_buffer("window_inv_freq", window_inv_freq, persistent=False)
        if not cpu.active():
            self._replace_frequencies(inv_freq)

    def _replace_frequencies(self, inv_freq: Tensor) -> None:
        if self.rope_scale != 1:
            raise ValueError("rope_type='yarn' is not supported with Transformer Engine")
        self.rotary_pos_emb.inv_freq = inv_freq.to(self.rotary_pos_emb.inv_freq.device)

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states

    def output_weight(self) -> Tensor:
        """[vocabulary, hidden], the embedding itself where they are tied."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def packed_parameters(self, layout: Layout, part: Part) -> PackedSeqParams:
        """What the attention of every layer needs to know about `layout`, of which this rank computes `part`."""
        lengths = torch.tensor([0, *(segment.length for segment in layout.segments)])
        bounds, longest = lengths.cumsum(0).int().to(self.inv_freq.device), int(lengths.max())
        common = {
            "qkv_format": "thd",
            "cu_seqlens_q": bounds,
            "cu_seqlens_kv": bounds,
            "max_seqlen_q": longest,
            "max_seqlen_kv": longest,
        }
        if not cpu.active():
            return PackedSeqParams(**common)
        positions = layout.positions[part.rows]
        return PlannedSeqParams(
            **common,
            plan=make_plan(part.pieces, part.where, self.window),
            angles=self._angles(positions, self.inv_freq, self.rope_scale),
            window_angles=self._window_angles(positions),
            group=parallel_state.get_context_parallel_group(),
        )

    def _window_angles(self, positions: Tensor) -> Angles | None:
        return None if self.window is None else self._angles(positions, self.window_inv_freq, self.window_rope_scale)

    def _angles(self, positions: Tensor, inv_freq: Tensor, scale: float) -> Angles:
        angles, dtype = (positions[:, None].float() * inv_freq)[:, None], self.config.params_dtype
        return Angles((angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype))


def _rope(hf: Any, layers: str) -> tuple[Tensor, float]:
    """Inverse frequencies [D/2] and the factor on cos and sin, from Hugging Face's own code, of one kind of layers."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    if "rope_type" in hf.rope_parameters:  # all kinds have the same
        rotary = LlamaRotaryEmbedding(hf)
        return rotary.inv_freq.float(), float(rotary.attention_scaling)
    rotary = Gemma3RotaryEmbedding(hf)
    return getattr(rotary, f"{layers}_inv_freq").float(), float(getattr(rotary, f"{layers}_attention_scaling"))
