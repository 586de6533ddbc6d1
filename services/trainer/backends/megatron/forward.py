"""A micro-batch through the model: log-probs of its trained tokens, in the batch's own alignment."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from services.trainer.backends.megatron.head import Head, token_log_probs
from services.trainer.backends.megatron.layout import Layout, plain, shared
from services.trainer.backends.megatron.model import PolicyModel
from services.trainer.backends.megatron.settings import Settings
from services.trainer.batch import Batch


def lay_out(batch: Batch, settings: Settings) -> Layout:
    """How this micro-batch lies in the model, on all ranks alike."""
    layout = shared(batch) if settings.shared_prefix else plain(batch)
    return layout.padded(settings.parallel.tensor if settings.parallel.sequence else 1)


def log_probs(model: PolicyModel, batch: Batch, settings: Settings) -> Tensor:
    """float32 [T] on the CPU, 0 where the loss mask is False; carries gradient when it is enabled."""
    layout = lay_out(batch, settings)
    return read(model, layout, hidden_states(model, layout), len(batch.tokens), settings.temperature)


def read(model: PolicyModel, layout: Layout, states: Tensor, count: int, temperature: float) -> Tensor:
    """The log-probs of `log_probs` from the last stage's `hidden_states`, for a batch of `count` tokens.

    Only the hidden states that predict a trained token reach the output layer.
    """
    if model.config.sequence_parallel:
        # The head has summed the gradient over the ranks already, so each just takes its part of it.
        states = gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=False)
    hidden = states.squeeze(1)
    device = hidden.device
    predicting = hidden.index_select(0, layout.predictors.to(device))
    values = token_log_probs(predicting, layout.targets.to(device), _head(model, temperature)).cpu()
    return values.new_zeros(count).index_put((layout.places,), values)


def hidden_states(model: PolicyModel, layout: Layout) -> Tensor:
    """[P, 1, hidden] (P / TP of them with sequence parallelism): what this stage of the model makes of `layout`, or of
    the states that the stage before it sent. The last stage's are those after the final norm."""
    device = model.inv_freq.device
    return model(
        input_ids=layout.tokens.to(device).unsqueeze(0),
        position_ids=layout.positions.to(device).unsqueeze(0),
        attention_mask=None,
        packed_seq_params=model.packed_parameters(layout),
    )


def _head(model: PolicyModel, temperature: float) -> Head:
    weight = model.output_weight()
    fused = model.config.gradient_accumulation_fusion and hasattr(weight, "main_grad") and torch.is_grad_enabled()
    group = parallel_state.get_tensor_model_parallel_group()
    first = group.rank() * len(weight)
    padding = min(len(weight), max(0, first + len(weight) - model.vocab_size))
    return Head(weight, temperature, first, group, fused, padding)
