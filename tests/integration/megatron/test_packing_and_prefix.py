"""Sequences that lie together in a micro-batch do not see each other, and a shared prompt changes no number."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.backends.megatron import forward, layout
from services.trainer.backends.megatron.backend import MegatronBackend
from services.trainer.batch import Batch
from tests.integration.megatron.support import (
    PLAIN_GRADIENT,
    load_reference,
    make_batch,
    make_config,
    one_step,
    ragged_batch,
    reference_log_probs,
    relative,
)

WHOLE: dict[str, Any] = {
    "policy.sequence_packing.train_mb_tokens": 4096,
    "policy.sequence_packing.logprob_mb_tokens": 4096,
}
SHARED: dict[str, Any] = {**WHOLE, "trainer.shared_prefix": True}


def replace_tokens(batch: Batch, sequence: int) -> Batch:
    tokens = batch.tokens.clone()
    places = batch.token_positions(torch.tensor([sequence]))
    tokens[places] = (tokens[places] + 1) % 307
    return dataclasses.replace(batch, tokens=tokens)


def test_packed_sequences_do_not_see_each_other(tiny: Path) -> None:
    """K-01: other tokens in one sequence leave the hidden states of every other bit-equal."""
    backend = MegatronBackend(make_config(tiny, WHOLE), tiny)
    batch = make_batch([(4, [8]), (6, [6]), (3, [9])])
    with torch.no_grad():
        before, after = (
            forward.hidden_states(backend.chunks[0], layout.plain(each)) for each in (batch, replace_tokens(batch, 1))
        )
    lengths = layout.needed_lengths(batch).tolist()
    for sequence, (a, b) in enumerate(zip(before.split(lengths), after.split(lengths), strict=True)):
        assert torch.equal(a, b) == (sequence != 1)


@pytest.mark.parametrize("changes", [WHOLE, SHARED], ids=["plain", "shared prefix"])
def test_packed_equals_one_sequence_at_a_time(changes: dict[str, Any], tiny: Path) -> None:
    """K-02: positions start anew in every sequence."""
    backend, batch = MegatronBackend(make_config(tiny, changes), tiny), ragged_batch()
    packed = backend.log_probs(batch)
    alone = torch.cat([backend.log_probs(batch.select(torch.tensor([index]))) for index in range(len(batch))])
    assert float((packed - alone).abs().max()) <= 1e-5
    with torch.no_grad():
        assert float((packed - reference_log_probs(load_reference(tiny), batch)).abs().max()) <= 1e-4


def test_a_shared_prompt_is_computed_once() -> None:
    batch = make_batch([(40, [32] * 8)] * 4, holes=False)
    # The last token of a response predicts nothing.
    assert len(layout.plain(batch)) == 32 * (40 + 31)
    assert len(layout.shared(batch)) == 4 * 40 + 32 * 31


@pytest.mark.parametrize("limit", [4096, 40, 25])
def test_a_shared_prompt_gives_the_same_log_probs_and_gradients(limit: int, tiny: Path) -> None:
    """However many of a group's sequences fit into a micro-batch, alone or beside other groups."""
    batch = ragged_batch()
    plain, plain_weights = one_step(tiny, batch, {**PLAIN_GRADIENT, **WHOLE})
    limits = {"policy.sequence_packing.train_mb_tokens": limit, "trainer.shared_prefix": True}
    shared, shared_weights = one_step(tiny, batch, {**PLAIN_GRADIENT, **limits})
    assert float((plain.log_probs - shared.log_probs).abs().max()) <= 1e-5
    assert shared.loss == pytest.approx(plain.loss, rel=1e-5)
    assert shared.grad_norm == pytest.approx(plain.grad_norm, rel=1e-5)
    assert all(relative(shared_weights[name], plain_weights[name]) <= 1e-5 for name in plain_weights)


def test_sequences_of_a_group_with_other_prompts_are_refused(tiny: Path) -> None:
    batch = make_batch([(5, [4, 4])], holes=False)
    tokens = batch.tokens.clone()
    tokens[0] += 1
    backend = MegatronBackend(make_config(tiny, SHARED), tiny)
    with pytest.raises(ValueError, match="group 0 do not share their prompt"):
        backend.log_probs(dataclasses.replace(batch, tokens=tokens % 307))


def test_a_mask_on_the_first_token_is_refused() -> None:
    batch = make_batch([(5, [4])])
    mask = batch.loss_mask.clone()
    mask[0] = True
    with pytest.raises(ValueError, match="first token of a sequence"):
        layout.plain(dataclasses.replace(batch, loss_mask=mask))


def test_the_longest_sequence_decides_the_capacity_needed(tiny: Path) -> None:
    backend = MegatronBackend(make_config(tiny, {"policy.sequence_packing.train_mb_tokens": 24}), tiny)
    with pytest.raises(ValueError, match="29 tokens, a bin holds 0 to 24"):
        backend.step(make_batch([(20, [10])], holes=False), lambda *_: pytest.fail("never called"))
