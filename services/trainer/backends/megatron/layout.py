"""How a micro-batch lies in the model: which tokens are computed, and from which of them each log-prob is read.

Pure. A sequence is cut behind the last position that predicts a trained token: what comes after it changes nothing.
Sequences of one group may share their prompt: it is then computed once, and every response sees it and itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.trainer.batch import Batch


@dataclass(frozen=True)
class Segment:
    """Tokens [start, start + length) of the layout: each sees itself and those before it in the segment, and all of
    the `prefix_length` tokens from `prefix_start`, which end just before it in position."""

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0


@dataclass(frozen=True)
class Layout:
    """P tokens to compute, M of whose positions predict a trained token.

    tokens, positions: int64 [P]. segments: cover all P in order. predictors: int64 [M], the layout position whose
    hidden state predicts. targets: int64 [M], the token predicted. places: int64 [M], where in the micro-batch's
    per-token fields the log-prob belongs.
    """

    tokens: Tensor
    positions: Tensor
    segments: tuple[Segment, ...]
    predictors: Tensor
    targets: Tensor
    places: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def padded(self, multiple: int) -> Layout:
        """The same behind which tokens that nobody reads make up the multiple, as a segment of their own."""
        missing = -len(self) % multiple
        if not missing:
            return self
        padding = torch.zeros(missing, dtype=torch.int64)
        return replace(
            self,
            tokens=torch.cat([self.tokens, padding]),
            positions=torch.cat([self.positions, torch.arange(missing)]),
            segments=(*self.segments, Segment(len(self), missing)),
        )


def needed_lengths(batch: Batch) -> Tensor:
    """int64 [N]: the tokens of each sequence that must be computed, 0 where nothing is trained."""
    last = torch.zeros(len(batch), dtype=torch.int64)
    offsets = torch.arange(len(batch.tokens)) - torch.repeat_interleave(batch.starts, batch.lengths)
    return last.scatter_reduce(0, batch.sequence_index, offsets * batch.loss_mask, "amax", include_self=True)


def plain(batch: Batch, multiple: int = 1) -> Layout:
    """Every sequence by itself, each filled up to a `multiple` of tokens."""
    return _build(batch, [[index] for index in range(len(batch))], share=False, multiple=multiple)


def shared(batch: Batch) -> Layout:
    """Sequences of one group behind one copy of their prompt, wherever two or more of them are in `batch`."""
    members: dict[int, list[int]] = {}
    for index, group in enumerate(batch.group.tolist()):
        members.setdefault(group, []).append(index)
    return _build(batch, list(members.values()), share=True)


class _Builder:
    """Collects pieces of the batch and remembers where in the layout each batch token went."""

    def __init__(self, batch: Batch, multiple: int) -> None:
        self.batch, self.multiple = batch, multiple
        self.sources: list[Tensor] = []
        self.positions: list[Tensor] = []
        self.segments: list[Segment] = []
        self.size = 0
        self.where = torch.full((len(batch.tokens),), -1, dtype=torch.int64)

    def add(self, source: int, position: int, length: int, prefix: Segment | None = None) -> Segment:
        """Lay out `length` batch tokens from `source`, the first at `position` of its sequence."""
        filled = length + -length % self.multiple
        segment = Segment(self.size, filled, *((prefix.start, prefix.length) if prefix else ()))
        places = torch.arange(source, source + length)
        # What fills it up comes last, where nothing that is read can see it: any token will do.
        self.sources.append(torch.arange(source, source + filled).clamp(max=source + length - 1))
        self.positions.append(torch.arange(position, position + filled))
        self.where[places] = self.size + torch.arange(length)
        self.segments.append(segment)
        self.size += filled
        return segment

    def finish(self) -> Layout:
        if not self.segments:
            # Nothing is trained here, but a rank that computes nothing may leave others waiting: compute one token.
            self.add(0, 0, 1)
        places = self.batch.loss_mask.nonzero().flatten()
        return Layout(
            tokens=self.batch.tokens[torch.cat(self.sources)],
            positions=torch.cat(self.positions),
            segments=tuple(self.segments),
            predictors=self.where[places - 1],
            targets=self.batch.tokens[places],
            places=places,
        )


def _build(batch: Batch, groups: list[list[int]], share: bool, multiple: int = 1) -> Layout:
    if batch.loss_mask[batch.starts].any():
        raise ValueError("loss_mask is set on the first token of a sequence, which nothing predicts")
    builder = _Builder(batch, multiple)
    needed, starts, prompts = needed_lengths(batch).tolist(), batch.starts.tolist(), batch.prompt_lengths.tolist()
    for group in groups:
        present = [index for index in group if needed[index] > 0]
        common = min((min(prompts[index], needed[index]) for index in present), default=0)
        if share and len(present) > 1 and common > 0:
            _add_group(builder, present, needed, starts, common)
        else:
            for index in present:
                builder.add(starts[index], 0, needed[index])
    return builder.finish()


def _add_group(builder: _Builder, members: list[int], needed: list[int], starts: list[int], prompt: int) -> None:
    tokens = builder.batch.tokens
    first = starts[members[0]]
    prefix = builder.add(first, 0, prompt)
    for index in members:
        start = starts[index]
        if not torch.equal(tokens[start : start + prompt], tokens[first : first + prompt]):
            raise ValueError(f"sequences of group {int(builder.batch.group[index])} do not share their prompt tokens")
        builder.where[start : start + prompt] = prefix.start + torch.arange(prompt)
        if needed[index] > prompt:
            builder.add(start + prompt, prompt, needed[index] - prompt, prefix)
