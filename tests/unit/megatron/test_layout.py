"""Layouts against what they stand for, computed token by token."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.backends.megatron import layout
from services.trainer.backends.megatron.layout import Layout
from services.trainer.batch import Batch

SEQUENCES = st.lists(
    st.tuples(st.integers(1, 4), st.lists(st.lists(st.booleans(), max_size=5), min_size=1, max_size=4)),
    min_size=1,
    max_size=4,
)


def make(groups: list[tuple[int, list[list[bool]]]]) -> Batch:
    """A batch in which every token's id is unique to its group (prompt) or its sequence (response)."""
    tokens: list[int] = []
    mask: list[bool] = []
    lengths, prompts, group = [], [], []
    for number, (prompt, responses) in enumerate(groups):
        for member, response in enumerate(responses):
            tokens += [1000 * number + place for place in range(prompt)]
            tokens += [1000 * number + 100 * (member + 1) + place for place in range(len(response))]
            mask += [False] * prompt + response
            lengths.append(prompt + len(response))
            prompts.append(prompt)
            group.append(number)
    count = len(tokens)
    return Batch(
        tokens=torch.tensor(tokens),
        lengths=torch.tensor(lengths),
        prompt_lengths=torch.tensor(prompts),
        group=torch.tensor(group),
        age=torch.zeros(len(lengths), dtype=torch.int64),
        loss_mask=torch.tensor(mask),
        generation_log_probs=torch.zeros(count),
        advantages=torch.zeros(count),
    )


def seen_by(made: Layout, position: int) -> list[tuple[int, int]]:
    """(token, position) of all that a place in the layout attends to, in order."""
    segment = next(s for s in made.segments if s.start <= position < s.start + s.length)
    places = [*range(segment.prefix_start, segment.prefix_start + segment.prefix_length)]
    places += range(segment.start, position + 1)
    return [(int(made.tokens[place]), int(made.positions[place])) for place in places]


def history_of(batch: Batch, place: int) -> list[tuple[int, int]]:
    """(token, position) of all tokens before a place of the batch, in its sequence."""
    start = int(batch.starts[batch.sequence_index[place]])
    return [(int(batch.tokens[at]), at - start) for at in range(start, place)]


@settings(deadline=None)  # a busy machine is no failure
@given(SEQUENCES, st.booleans())
def test_every_trained_token_is_predicted_from_its_whole_history(
    groups: list[tuple[int, list[list[bool]]]], share: bool
) -> None:
    """K-02, T-08: whichever way prompts are laid out."""
    batch = make(groups)
    made = (layout.shared if share else layout.plain)(batch)
    assert made.places.tolist() == batch.loss_mask.nonzero().flatten().tolist()
    assert torch.equal(made.targets, batch.tokens[made.places])
    for predictor, place in zip(made.predictors.tolist(), made.places.tolist(), strict=True):
        assert seen_by(made, predictor) == history_of(batch, place)


@settings(deadline=None)  # a busy machine is no failure
@given(SEQUENCES, st.booleans())
def test_segments_cover_the_layout_in_order(groups: list[tuple[int, list[list[bool]]]], share: bool) -> None:
    made = (layout.shared if share else layout.plain)(make(groups))
    end = 0
    for segment in made.segments:
        assert segment.start == end and segment.length > 0
        assert segment.prefix_start + segment.prefix_length <= segment.start
        end += segment.length
    assert end == len(made) == len(made.positions)


@settings(deadline=None)  # a busy machine is no failure
@given(SEQUENCES)
def test_nothing_is_computed_that_no_trained_token_needs(groups: list[tuple[int, list[list[bool]]]]) -> None:
    batch = make(groups)
    made = layout.shared(batch)
    needed = {
        (int(batch.group[batch.sequence_index[place]]), *seen)
        for place in made.places.tolist()
        for seen in history_of(batch, place)
    }
    assert len(made) == max(1, len(needed))


def test_a_batch_without_trained_tokens_is_one_token() -> None:
    """K-13"""
    made = layout.plain(make([(3, [[False, False]])]))
    assert (len(made), len(made.predictors)) == (1, 0)


def test_padding_is_a_segment_of_its_own_at_the_end() -> None:
    """K-03, K-04, K-06: sequences of 5 and 3 in a bin of 16 keep their places, their positions, and what they see."""
    batch = make([(2, [[True] * 4]), (1, [[True] * 3])])  # of which the last tokens predict nothing
    made, padded = layout.plain(batch), layout.plain(batch).padded(16)
    assert [(segment.start, segment.length) for segment in padded.segments] == [(0, 5), (5, 3), (8, 8)]
    assert padded.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, *range(8)]
    assert padded.predictors.max() < 8 and torch.equal(padded.predictors, made.predictors)
    for place in range(8):
        assert seen_by(padded, place) == seen_by(made, place)
