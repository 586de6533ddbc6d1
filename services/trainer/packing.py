"""Putting sequences into bins of limited size, and bins onto ranks. Pure; sizes are tokens.

An item may be a sequence or a whole group that shares its prompt: only its size matters here.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Algorithm = Literal["concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing"]
Packed = list[list[int]]
GOOD_ENOUGH = 1.005  # slowest rank over the mean, below which looking for a better deal costs more than it saves


@dataclass
class _Bins:
    """Open bins of one capacity, with what is left in each."""

    sizes: NDArray[np.int64]
    capacity: int
    contents: Packed = field(default_factory=list)
    _left: NDArray[np.int64] = field(default_factory=lambda: np.zeros(64, np.int64))

    def left(self, index: int) -> int:
        return int(self._left[index])

    def open(self, item: int) -> None:
        """A new bin with `item` in it."""
        if len(self.contents) == len(self._left):
            self._left = np.concatenate([self._left, np.zeros_like(self._left)])
        self._left[len(self.contents)] = self.capacity - self.sizes[item]
        self.contents.append([item])

    def add(self, index: int, item: int) -> None:
        self.contents[index].append(item)
        self._left[index] -= self.sizes[item]

    def first_fit(self, item: int) -> None:
        """Into the first bin with room for it, else into a new one."""
        fits = self._left[: len(self.contents)] >= self.sizes[item]
        if fits.any():
            self.add(int(fits.argmax()), item)
        else:
            self.open(item)


def pack(
    lengths: Sequence[int], capacity: int, algorithm: Algorithm, multiple_of_bins: int = 1, seed: int = 0
) -> Packed:
    """Bins of indices into `lengths`, none above `capacity` tokens, every index in exactly one bin.

    The number of bins is a multiple of `multiple_of_bins` (the data-parallel ranks, which must make equally many
    steps); fuller bins are split to reach it, and only when there are fewer items than bins is a bin empty.
    `seed` is the order of first_fit_shuffle. Raises ValueError naming the item that is longer than the capacity.
    """
    sizes = np.asarray(lengths, np.int64)
    _check(sizes, capacity, multiple_of_bins)
    try:
        packer = _ALGORITHMS[algorithm]
    except KeyError:
        raise ValueError(f"unknown packing algorithm {algorithm!r}: choose one of {sorted(_ALGORITHMS)}") from None
    bins = packer(_Bins(sizes, capacity), seed)
    target = math.ceil(len(bins) / multiple_of_bins) * multiple_of_bins
    return _spread(bins, sizes, target)


def _check(sizes: NDArray[np.int64], capacity: int, multiple_of_bins: int) -> None:
    if multiple_of_bins < 1:
        raise ValueError(f"multiple_of_bins must be at least 1, got {multiple_of_bins}")
    bad = np.flatnonzero((sizes > capacity) | (sizes < 0))
    if len(bad):
        raise ValueError(f"sequence {bad[0]} has {sizes[bad[0]]} tokens, a bin holds 0 to {capacity}")


def _decreasing(sizes: NDArray[np.int64]) -> list[int]:
    return np.argsort(-sizes, kind="stable").tolist()


def _concatenative(bins: _Bins, seed: int) -> Packed:
    """In the order given; a new bin as soon as the current one is full."""
    for item, size in enumerate(bins.sizes):
        if bins.contents and bins.left(-1 + len(bins.contents)) >= size:
            bins.add(len(bins.contents) - 1, item)
        else:
            bins.open(item)
    return bins.contents


def _first_fit_decreasing(bins: _Bins, seed: int) -> Packed:
    for item in _decreasing(bins.sizes):
        bins.first_fit(item)
    return bins.contents


def _first_fit_shuffle(bins: _Bins, seed: int) -> Packed:
    for item in np.random.default_rng(seed).permutation(len(bins.sizes)).tolist():
        bins.first_fit(item)
    return bins.contents


def _modified_first_fit_decreasing(bins: _Bins, seed: int) -> Packed:
    """Johnson and Garey 1985: first-fit decreasing wastes room when a bin of one large item could have taken two
    small ones, so bins of a large item (over half) are completed on purpose before the rest is first-fitted."""
    order = _decreasing(bins.sizes)
    shares = bins.sizes / max(bins.capacity, 1)
    medium = [item for item in order if 1 / 3 < shares[item] <= 1 / 2]
    small = [item for item in order if 1 / 6 < shares[item] <= 1 / 3]
    for item in order:
        if shares[item] > 1 / 2:
            bins.open(item)
    large = range(len(bins.contents))
    placed: set[int] = set()
    pool = _Pool(medium, bins.sizes)
    without_medium = [index for index in large if not _add_largest(bins, index, pool, placed)]
    pool = _Pool(small, bins.sizes)
    for index in reversed(without_medium):
        _add_pair(bins, index, pool, placed)
    pool = _Pool([item for item in order if shares[item] <= 1 / 2 and item not in placed], bins.sizes)
    for index in large:
        while _add_largest(bins, index, pool, placed):
            pass
    for item in reversed(pool.items):
        bins.first_fit(item)
    return bins.contents


class _Pool:
    """Items still to place, smallest first."""

    def __init__(self, descending: list[int], sizes: NDArray[np.int64]) -> None:
        self.items = descending[::-1]
        self.sizes = sizes[self.items].tolist()

    def take(self, position: int) -> int:
        del self.sizes[position]
        return self.items.pop(position)


def _add_largest(bins: _Bins, index: int, pool: _Pool, placed: set[int]) -> bool:
    """Move the largest item that fits into the bin; False when none does."""
    position = bisect_right(pool.sizes, bins.left(index)) - 1
    if position < 0:
        return False
    item = pool.take(position)
    bins.add(index, item)
    placed.add(item)
    return True


def _add_pair(bins: _Bins, index: int, pool: _Pool, placed: set[int]) -> None:
    """Move the smallest item and the largest that fits beside it, if two fit at all."""
    if len(pool.items) >= 2 and sum(pool.sizes[:2]) <= bins.left(index):
        item = pool.take(0)
        bins.add(index, item)
        placed.add(item)
        _add_largest(bins, index, pool, placed)


_ALGORITHMS: dict[str, Callable[[_Bins, int], Packed]] = {
    "concatenative": _concatenative,
    "first_fit_decreasing": _first_fit_decreasing,
    "first_fit_shuffle": _first_fit_shuffle,
    "modified_first_fit_decreasing": _modified_first_fit_decreasing,
}


def _spread(bins: Packed, sizes: NDArray[np.int64], target: int) -> Packed:
    """Exactly `target` bins: the fullest that has two items gives its smaller half to a new one, while any can."""
    result = [list(one) for one in bins]
    while len(result) < target:
        divisible = [index for index, one in enumerate(result) if len(one) > 1]
        if not divisible:
            return result + [[] for _ in range(target - len(result))]
        fullest = max(divisible, key=lambda index: int(sizes[result[index]].sum()))
        kept, given = _halves(result[fullest], sizes)
        result[fullest] = kept
        result.append(given)
    return result


def _halves(items: list[int], sizes: NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """Two non-empty parts of nearly equal size."""
    parts: tuple[list[int], list[int]] = ([], [])
    loads = [0, 0]
    for item in sorted(items, key=lambda one: -int(sizes[one])):
        side = 0 if not parts[0] or (parts[1] and loads[0] <= loads[1]) else 1
        parts[side].append(item)
        loads[side] += int(sizes[item])
    return parts


def balance(
    bins: Sequence[Sequence[int]], lengths: Sequence[int], ranks: int, attention: Sequence[float] | None = None
) -> list[list[int]]:
    """For each rank, indices of the bins it gets: equally many each, tokens and attention cost close to equal.

    attention: the cost of each item in any unit; by default its squared length, which is too much for a group whose
    sequences share a prompt and do not attend to each other. Both costs are taken as shares of their totals, so that
    neither unit counts for more. The slowest rank sets the time of a step. `ranks` is the number of data-parallel
    ranks, not the world size. Raises ValueError when the bins cannot be dealt equally.
    """
    if ranks < 1 or len(bins) % ranks:
        raise ValueError(f"{len(bins)} bins cannot be dealt equally to {ranks} ranks")
    sizes = np.asarray(lengths, np.float64)
    costs = _costs(bins, sizes, sizes**2 if attention is None else np.asarray(attention, np.float64))
    return _swap(_deal(costs, ranks), costs)


def _costs(
    bins: Sequence[Sequence[int]], tokens: NDArray[np.float64], attention: NDArray[np.float64]
) -> NDArray[np.float64]:
    """float64 [bins, 2]: share of all tokens, share of all attention cost."""
    rows = [(tokens[list(one)].sum(), attention[list(one)].sum()) for one in bins]
    table = np.asarray(rows, np.float64).reshape(-1, 2)
    totals = table.sum(axis=0)
    return table / np.where(totals > 0, totals, 1.0)


def _deal(costs: NDArray[np.float64], ranks: int) -> list[list[int]]:
    """Most expensive bin first, each to the least loaded rank that has room left."""
    per_rank = len(costs) // ranks
    weight = costs.sum(axis=1)
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = np.zeros(ranks)
    for index in np.argsort(-weight, kind="stable").tolist():
        rank = min((r for r in range(ranks) if len(dealt[r]) < per_rank), key=lambda r: loads[r])
        dealt[rank].append(index)
        loads[rank] += weight[index]
    return dealt


def _swap(dealt: list[list[int]], costs: NDArray[np.float64]) -> list[list[int]]:
    """Exchange a bin of the slowest rank with one of another as long as that makes the slower of the two faster."""
    for _ in range(4 * len(costs)):  # each pass lowers the worst pair; the bound only caps the time
        if not _improve(dealt, costs):
            break
    return dealt


def _improve(dealt: list[list[int]], costs: NDArray[np.float64]) -> bool:
    loads = np.stack([costs[one].sum(axis=0) for one in dealt])
    slowest = int(loads.max(axis=1).argmax())
    if loads[slowest].max() * len(dealt) <= GOOD_ENOUGH:
        return False
    best: tuple[float, int, int, int] = (float(loads[slowest].max()) - 1e-12, -1, -1, -1)
    for rank in range(len(dealt)):
        if rank != slowest:
            best = min(best, _best_exchange(dealt, costs, loads, slowest, rank))
    _, rank, mine, other = best
    if rank < 0:
        return False
    dealt[slowest][mine], dealt[rank][other] = dealt[rank][other], dealt[slowest][mine]
    return True


def _best_exchange(
    dealt: list[list[int]], costs: NDArray[np.float64], loads: NDArray[np.float64], slowest: int, rank: int
) -> tuple[float, int, int, int]:
    """(worst load of the two after the best exchange, rank, position in the slowest, position in the rank)."""
    change = costs[dealt[slowest]][:, None, :] - costs[dealt[rank]][None, :, :]
    worst = np.maximum((loads[slowest] - change).max(axis=2), (loads[rank] + change).max(axis=2))
    mine, other = np.unravel_index(int(worst.argmin()), worst.shape)
    return float(worst[mine, other]), rank, int(mine), int(other)
