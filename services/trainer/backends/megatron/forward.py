"""A micro-batch through the model: log-probs of its trained tokens, in the batch's own alignment."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor

from services.trainer.backends.megatron.context import Part, part_of
from services.trainer.backends.megatron.head import Head, token_log_probs
from services.trainer.backends.megatron.layout import Layout, plain, shared
from services.trainer.backends.megatron.model import PolicyModel
from services.trainer.backends.megatron.settings import Settings
from services.trainer.batch import Batch


def lay_out(batch: Batch, settings: Settings) -> Layout:
    """How this micro-batch lies in the model, on all ranks alike."""
    parallel = settings.parallel
    layout = shared(batch) if settings.shared_prefix else plain(batch, parallel.sequence_multiple)
    return layout.padded(parallel.sequence_multiple * (parallel.tensor if parallel.sequence else 1))


def log_probs(model: PolicyModel, batch: Batch, settings: Settings) -> Tensor:
    """float32 [T] on the CPU, 0 where the loss mask is False; carries gradient when it is enabled."""
    layout = lay_out(batch, settings)
    return read(model, layout, hidden_states(model, layout), len(batch.tokens), settings.temperature)


def hidden_states(model: PolicyModel, layout: Layout) -> Tensor:
    """[rows, 1, hidden]: what this stage of the model makes of `layout`, or of the states that the stage before it
    sent, on the rows of this context-parallel rank (shared over the tensor-parallel ones with sequence parallelism).
    The last stage's are those after the final norm."""
    device, part = model.inv_freq.device, _part(layout)
    return model(
        input_ids=layout.tokens[part.rows].to(device).unsqueeze(0),
        position_ids=layout.positions[part.rows].to(device).unsqueeze(0),
        attention_mask=None,
        packed_seq_params=model.packed_parameters(layout, part),
    )


def read(model: PolicyModel, layout: Layout, states: Tensor, count: int, temperature: float) -> Tensor:
    """What `log_probs` returns, from the last stage's `hidden_states`, for a batch of `count` tokens.

    Only the hidden states that predict a trained token reach the output layer.
    """
    if model.config.sequence_parallel:
        # The head has summed the gradient over the ranks already, so each just takes its part of it.
        states = gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=False)
    hidden = states.squeeze(1)
    mine, rows = _part(layout).local(layout.predictors)
    targets, places = layout.targets[mine].to(hidden.device), layout.places[mine].to(hidden.device)
    values = token_log_probs(hidden.index_select(0, rows.to(hidden.device)), targets, _head(model, temperature))
    result = values.new_zeros(count).index_put((places,), values)
    # Each rank differentiates the same loss by the log-probs that it computed.
    return reduce_from_tensor_model_parallel_region(result, group=parallel_state.get_context_parallel_group()).cpu()


def _part(layout: Layout) -> Part:
    ranks = parallel_state.get_context_parallel_world_size()
    return part_of(layout, parallel_state.get_context_parallel_rank(), ranks)


def _head(model: PolicyModel, temperature: float) -> Head:
    weight = model.output_weight()
    fused = model.config.gradient_accumulation_fusion and hasattr(weight, "main_grad") and torch.is_grad_enabled()
    group = parallel_state.get_tensor_model_parallel_group()
    first = group.rank() * len(weight)
    padding = min(len(weight), max(0, first + len(weight) - model.vocab_size))
    return Head(weight, temperature, first, group, fused, padding)
