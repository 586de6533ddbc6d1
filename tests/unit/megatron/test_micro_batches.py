"""How a batch is dealt to ranks and micro-batches."""

from __future__ import annotations

import pytest
import torch

from services.trainer.backends.megatron.layout import plain, shared
from services.trainer.backends.megatron.micro_batches import _units, evenness, split
from services.trainer.backends.megatron.settings import MicroBatching
from services.trainer.batch import Batch

LIMIT = 40


def make(sizes: list[tuple[int, list[int]]], flat: tuple[int, ...] = ()) -> Batch:
    """Groups of (prompt, responses), all response tokens trained; groups in `flat` have no advantage."""
    lengths = [prompt + response for prompt, responses in sizes for response in responses]
    prompts = [prompt for prompt, responses in sizes for _ in responses]
    group = [number for number, (_, responses) in enumerate(sizes) for _ in responses]
    mask = torch.cat([torch.arange(size) >= prompt for size, prompt in zip(lengths, prompts, strict=True)])
    alive = torch.repeat_interleave(torch.tensor([number not in flat for number in group]), torch.tensor(lengths))
    return Batch(
        tokens=torch.ones(sum(lengths), dtype=torch.int64),
        lengths=torch.tensor(lengths),
        prompt_lengths=torch.tensor(prompts),
        group=torch.tensor(group),
        age=torch.zeros(len(lengths), dtype=torch.int64),
        loss_mask=mask,
        generation_log_probs=torch.zeros(sum(lengths)),
        advantages=(mask & alive).float(),
    )


RAGGED = make([(5, [7, 1, 12]), (11, [3, 9, 2]), (2, [30]), (6, [4, 4, 4, 4, 4])])
COUNTED, PACKED = MicroBatching(sequences=2), MicroBatching(sequences=2, tokens=LIMIT)


@pytest.mark.parametrize("how", [COUNTED, PACKED], ids=["counted", "packed"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_every_sequence_once_and_as_many_steps_on_every_rank(
    how: MicroBatching, ranks: int, share: bool, apart: bool
) -> None:
    """K-10, K-12"""
    dealt = split(RAGGED, how, ranks, share_prefix=share, apart=apart)
    assert len(dealt) == ranks
    assert len({len(own) for own in dealt}) == 1
    assert sorted(int(i) for own in dealt for members in own for i in members) == list(range(len(RAGGED)))


@pytest.mark.parametrize("share", [False, True])
def test_limits_are_kept(share: bool) -> None:
    for members in split(RAGGED, COUNTED, 1, share_prefix=share)[0]:
        assert len(members) <= 2
    for members in split(RAGGED, PACKED, 1, share_prefix=share)[0]:
        picked = RAGGED.select(members)
        assert len(shared(picked) if share else plain(picked)) <= LIMIT


def test_a_group_stays_together_where_it_fits() -> None:
    batch = make([(20, [2] * 8), (20, [2] * 8)])
    micro_batches = split(batch, PACKED, 1, share_prefix=True)[0]
    assert sorted(members.tolist() for members in micro_batches) == [list(range(8)), list(range(8, 16))]


def test_what_has_no_advantage_lies_apart() -> None:
    batch = make([(4, [4, 4]), (4, [4, 4]), (4, [4, 4])], flat=(1,))
    wide = MicroBatching(sequences=6, tokens=1000)
    assert [sorted(m.tolist()) for m in split(batch, wide, 1, share_prefix=True, apart=True)[0]] == [
        [0, 1, 4, 5],
        [2, 3],
    ]
    assert len(split(batch, wide, 1, share_prefix=True)[0]) == 1


def test_a_sequence_that_fits_nowhere_is_named() -> None:
    with pytest.raises(ValueError, match="31 tokens, a bin holds 0 to 20"):
        split(RAGGED, MicroBatching(sequences=1, tokens=20), 1, share_prefix=False)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_interleaved_schedule_gets_a_multiple_of_its_stages(ranks: int) -> None:
    for how in (COUNTED, PACKED):
        dealt = split(RAGGED, how, ranks, share_prefix=False, rounds=4)
        assert {len(own) % 4 for own in dealt} == {0}
        assert sorted(int(i) for own in dealt for members in own for i in members) == list(range(len(RAGGED)))


def test_limits_are_kept_with_what_fills_sequences_up() -> None:
    """K-06, K-09: with context parallelism each takes a multiple of tokens."""
    for members in split(RAGGED, PACKED, 1, share_prefix=False, multiple=8)[0]:
        assert len(plain(RAGGED.select(members), multiple=8)) <= LIMIT


def test_evenness_against_counts_by_hand() -> None:
    """Two sequences of 3 and one of 8 computed tokens, in fours: 4 + 4 and 8, of 14 of 16 needed."""
    batch = make([(1, [3, 3]), (2, [7])])
    dealt = [[torch.tensor([0, 1])], [torch.tensor([2])]]
    found = evenness(batch, dealt, multiple=4)
    assert found["packing_padding_fraction"] == pytest.approx(2 / 16)
    assert found["packing_token_imbalance"] == pytest.approx(0)
    assert found["packing_attention_imbalance"] == pytest.approx(64 / ((2 * 16 + 64) / 2) - 1)
    assert found["packing_micro_batches"] == 1


def test_four_ranks_have_about_the_same_to_do() -> None:
    """Log-normal lengths, a quarter of the limit on average: at most 5 % over the mean in tokens and in attention."""
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.randn(256, generator=generator) * 0.6 - 0.18).exp().mul(64).clamp(4, 256).int().tolist()
    batch = make([(1, [length - 1]) for length in lengths])
    found = evenness(batch, split(batch, MicroBatching(1, tokens=256), 4, share_prefix=False), 1)
    assert found["packing_token_imbalance"] <= 0.05
    assert found["packing_attention_imbalance"] <= 0.05


@pytest.mark.parametrize("prompt", [0, 3, 12])
def test_the_attention_of_a_shared_prompt(prompt: int) -> None:
    """A shared prompt attends once; each response to it and to itself, not to the others."""
    batch = make([(prompt + 1, [5, 3, 8])])
    (unit,) = _units(batch, MicroBatching(sequences=3, tokens=1000), True, 1)
    own = [4, 2, 7]  # nothing is computed for a last token
    pairs = (prompt + 1) ** 2 + sum((prompt + 1 + each) ** 2 - (prompt + 1) ** 2 for each in own)
    assert (unit.tokens, unit.attention) == (prompt + 1 + sum(own), pairs)
