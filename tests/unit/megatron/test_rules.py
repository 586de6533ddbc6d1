"""The table of weights, and shares of them. tests/integration/megatron/test_parity.py takes models through it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core")

from services.trainer.backends.megatron.families import FAMILIES
from services.trainer.backends.megatron.rules import TABLES, find_rule, pad_rows, shard, unshard
from trireme.config.model_features import ARCHITECTURES


def test_the_configuration_lets_in_what_the_trainer_knows() -> None:
    assert set(FAMILIES) == set(TABLES) == set(ARCHITECTURES)


def test_experts_have_the_numbers_of_the_whole_model() -> None:
    """W-17"""
    _, names = find_rule("Qwen3MoeForCausalLM", "decoder.layers.7.mlp.experts.12.linear_fc1.weight")
    assert names == [f"model.layers.7.mlp.experts.12.{part}_proj.weight" for part in ("gate", "up")]


@pytest.mark.parametrize(("dim", "stacked"), [(0, 1), (0, 2), (1, 1)])
def test_shares_put_together_are_the_whole(dim: int, stacked: int) -> None:
    whole = torch.arange(12 * 6).view(12, 6)
    parts = [shard(whole, dim, stacked, rank, 3) for rank in range(3)]
    assert torch.equal(unshard(parts, dim, stacked), whole)
    if stacked == 2:  # gate and up are each shared by themselves
        assert parts[1][:, 0].tolist() == [12, 18, 48, 54]


def test_what_cannot_be_shared_evenly_is_refused() -> None:
    with pytest.raises(ValueError, match="10 rows of 2 blocks cannot be shared over 2 ranks"):
        shard(torch.zeros(10, 2), 0, 2, 0, 2)


def test_padding_is_zero_and_below() -> None:
    """W-11"""
    assert pad_rows(torch.ones(3, 2), 4).tolist() == [[1, 1], [1, 1], [1, 1], [0, 0]]
