"""Which sequences are computed together, and by which data-parallel rank. Pure."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from services.trainer.backends.megatron.layout import needed_lengths
from services.trainer.backends.megatron.settings import MicroBatching
from services.trainer.batch import Batch
from services.trainer.packing import balance, pack


class Unit(NamedTuple):
    """Sequences that stay together, the tokens that they take, and the pairs that attend, twice over."""

    members: list[int]
    tokens: int
    attention: int


def split(
    batch: Batch,
    how: MicroBatching,
    ranks: int,
    *,
    share_prefix: bool,
    seed: int = 0,
    apart: bool = False,
    rounds: int = 1,
    multiple: int = 1,
) -> list[list[Tensor]]:
    """For every rank its micro-batches, each the int64 indices of its sequences (maybe none); equally many on all.

    Every sequence is in exactly one of them. With `apart`, what has no advantage lies apart from what has: its
    gradient is likely zero, and a micro-batch without one needs no backward pass. Their number on each rank is a
    multiple of `rounds`; each sequence takes a `multiple` of tokens.
    """
    units = _units(batch, how, share_prefix, multiple)
    kinds = _by_advantage(batch, units) if apart else [units]
    dealt: list[list[Tensor]] = [[] for _ in range(ranks)]
    for kind in kinds:
        for rank, members in enumerate(_deal(kind, how, ranks, seed, rounds)):
            dealt[rank] += members
    return dealt


def evenness(batch: Batch, dealt: list[list[Tensor]], multiple: int) -> dict[str, float]:
    """How well sequences were packed: the share of tokens that only fills up, and by how much the rank with most
    tokens, or most attention (squared lengths), exceeds the mean. A shared prompt counts in each of its sequences."""
    needed, filled = _filled(batch, 1), _filled(batch, multiple).double()
    members = [torch.cat(each) for each in dealt]
    tokens = torch.stack([filled[each].sum() for each in members])
    attention = torch.stack([filled[each].square().sum() for each in members])
    return {
        "packing_padding_fraction": float(1 - needed.sum() / filled.sum()),
        "packing_token_imbalance": float(tokens.max() / tokens.mean() - 1),
        "packing_attention_imbalance": float(attention.max() / attention.mean() - 1),
        "packing_micro_batches": float(len(dealt[0])),
    }


def _deal(units: list[Unit], how: MicroBatching, ranks: int, seed: int, rounds: int) -> list[list[Tensor]]:
    bins = _pack(units, how, ranks * rounds, seed)
    bins += [[] for _ in range(-len(bins) % (ranks * rounds))]
    members = [torch.tensor([i for unit in each for i in units[unit].members], dtype=torch.int64) for each in bins]
    dealt = balance(bins, [unit.tokens for unit in units], ranks, [unit.attention for unit in units])
    return [[members[index] for index in own] for own in dealt]


def _by_advantage(batch: Batch, units: list[Unit]) -> list[list[Unit]]:
    """Units with an advantage other than zero, and those without."""
    found = torch.zeros(len(batch)).index_add(0, batch.sequence_index, (batch.advantages != 0).float())
    kinds: tuple[list[Unit], list[Unit]] = ([], [])
    for unit in units:
        kinds[0 if found[unit.members].any() else 1].append(unit)
    return [kind for kind in kinds if kind]


def _filled(batch: Batch, multiple: int) -> Tensor:
    """int64 [N]: the tokens that each sequence takes."""
    needed = needed_lengths(batch).clamp(min=1)
    return needed + -needed % multiple


def _units(batch: Batch, how: MicroBatching, share_prefix: bool, multiple: int) -> list[Unit]:
    needed = _filled(batch, multiple).tolist()
    if not share_prefix:
        return [Unit([index], length, length**2) for index, length in enumerate(needed)]
    prompts, units = batch.prompt_lengths.tolist(), []
    for members in _groups(batch):
        units += _share(members, needed, prompts, how)
    return units


def _groups(batch: Batch) -> list[list[int]]:
    members: dict[int, list[int]] = {}
    for index, group in enumerate(batch.group.tolist()):
        members.setdefault(group, []).append(index)
    return list(members.values())


def _share(members: list[int], needed: list[int], prompts: list[int], how: MicroBatching) -> list[Unit]:
    """A group, in as few pieces as the limit allows; each piece computes the prompt once."""
    units: list[Unit] = []
    for index in members:
        prompt = min(needed[index], prompts[index])
        own = needed[index] - prompt
        if units and _room(units[-1], own, how):
            last = units[-1]
            # A response attends to itself and to the prompt, not to the others.
            units[-1] = Unit([*last.members, index], last.tokens + own, last.attention + own * (own + 2 * prompt))
        else:
            units.append(Unit([index], needed[index], needed[index] ** 2))
    return units


def _room(unit: Unit, tokens: int, how: MicroBatching) -> bool:
    return len(unit.members) < how.sequences if how.tokens is None else unit.tokens + tokens <= how.tokens


def _pack(units: list[Unit], how: MicroBatching, multiple: int, seed: int) -> list[list[int]]:
    if how.tokens is None:
        return _by_count([len(unit.members) for unit in units], how.sequences)
    return pack([unit.tokens for unit in units], how.tokens, how.algorithm, multiple_of_bins=multiple, seed=seed)


def _by_count(sizes: list[int], limit: int) -> list[list[int]]:
    """Consecutive units until `limit` sequences are together."""
    bins: list[list[int]] = []
    room = 0
    for unit, size in enumerate(sizes):
        if not bins or size > room:
            bins.append([])
            room = limit
        bins[-1].append(unit)
        room -= size
    return bins
