"""A micro-batch through the model: log-probs of its trained tokens, in the batch's own alignment."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from services.trainer.backends.megatron.head import Head, token_log_probs
from services.trainer.backends.megatron.layout import Layout, plain, shared
from services.trainer.backends.megatron.model import PolicyModel
from services.trainer.batch import Batch


def log_probs(model: PolicyModel, batch: Batch, temperature: float, share_prefix: bool) -> Tensor:
    """float32 [T] on the CPU, 0 where the loss mask is False; carries gradient when it is enabled.

    Only the hidden states that predict a trained token reach the output layer.
    """
    layout = shared(batch) if share_prefix else plain(batch)
    hidden = hidden_states(model, layout.padded(_multiple(model)))
    device = hidden.device
    predicting = hidden.index_select(0, layout.predictors.to(device))
    values = token_log_probs(predicting, layout.targets.to(device), _head(model, temperature)).cpu()
    return values.new_zeros(len(batch.tokens)).index_put((layout.places,), values)


def hidden_states(model: PolicyModel, layout: Layout) -> Tensor:
    """[P, hidden]: the model's last hidden states, after its final norm."""
    device = model.inv_freq.device
    states = model(
        input_ids=layout.tokens.to(device).unsqueeze(0),
        position_ids=layout.positions.to(device).unsqueeze(0),
        attention_mask=None,
        packed_seq_params=model.packed_parameters(layout),
    )
    if model.config.sequence_parallel:
        # The head has summed the gradient over the ranks already, so each just takes its part of it.
        states = gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=False)
    return states.squeeze(1)


def _multiple(model: PolicyModel) -> int:
    return model.config.tensor_model_parallel_size if model.config.sequence_parallel else 1


def _head(model: PolicyModel, temperature: float) -> Head:
    weight = model.output_weight()
    fused = model.config.gradient_accumulation_fusion and hasattr(weight, "main_grad") and torch.is_grad_enabled()
    group = parallel_state.get_tensor_model_parallel_group()
    first = group.rank() * len(weight)
    padding = min(len(weight), max(0, first + len(weight) - model.vocab_size))
    return Head(weight, temperature, first, group, fused, padding)
