"""Prompts as token ids, in an order that resumes."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from services.trainer.data.base import DataError
from services.trainer.data.holdout import ListDataset
from services.trainer.data.sampler import PreparedPrompt, PromptSampler
from tests.unit.data.support import NO_BOS, TEMPLATE, TWO_BOS, Settings, items, tokenizer

TEN = ListDataset("ten", items(*(f"prompt {i}" for i in range(10))))


def sampler(
    dataset: ListDataset = TEN, seed: int = 1, max_epochs: int | None = None, **settings: object
) -> PromptSampler:
    return PromptSampler(dataset, tokenizer(), Settings(**settings), seed, max_epochs=max_epochs)  # type: ignore[arg-type]


def places(prompts: list[PreparedPrompt]) -> list[tuple[int, int]]:
    return [(p.epoch, p.index) for p in prompts]


def test_token_ids_are_those_of_the_chat_template() -> None:
    """T-01: the same ids as transformers' own tokenizing apply_chat_template, with one BOS, which it begins with."""
    chat = tokenizer()
    dataset = ListDataset("one", items("2 + 2 = ?"))
    [prompt] = PromptSampler(dataset, chat, Settings(system_prompt="Be brief."), 0).next(1)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2 = ?"}]
    expected = chat.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert prompt.token_ids == expected
    assert prompt.text == "<s><|system|>Be brief.</s><|user|>2 + 2 = ?</s><|assistant|>"
    assert prompt.token_ids.count(chat.bos_token_id) == 1
    assert chat.decode(prompt.token_ids) == prompt.text


@pytest.mark.parametrize(
    ("template", "adds_bos", "count"),
    [
        (TEMPLATE, True, 1),
        (TEMPLATE, False, 1),
        (TWO_BOS, True, 1),
        (NO_BOS, True, 0),
        (None, True, 1),
        (None, False, 0),
    ],
)
def test_bos_exactly_once(template: str | None, adds_bos: bool, count: int) -> None:
    """T-01: a template that writes BOS, twice or not at all; a base model without a template, which gets the text."""
    chat = tokenizer(template, adds_bos=adds_bos)
    [prompt] = PromptSampler(ListDataset("one", items("hello")), chat, Settings(), 0).next(1)
    assert prompt.token_ids.count(chat.bos_token_id) == count
    assert prompt.token_ids[:count] == [chat.bos_token_id] * count
    if template is None:
        assert chat.decode(prompt.token_ids[count:]) == "hello"


def test_a_multi_turn_prompt_keeps_its_own_system_message(tmp_path: Path) -> None:
    (tmp_path / "template.txt").write_text("Solve: {}\nBox it as \\boxed{{}}.")
    (tmp_path / "system.txt").write_text("Ours.\n")
    [item] = items("last")
    messages = [{"role": "system", "content": "Its own."}, {"role": "user", "content": "first"},
                {"role": "assistant", "content": "reply"}, *item.messages]  # fmt: skip
    conversation = type(item)(messages, item.task, 0)
    settings = {"prompt_file": tmp_path / "template.txt", "system_prompt_file": tmp_path / "system.txt"}
    [prompt] = sampler(ListDataset("one", [conversation]), **settings).next(1)
    assert "Its own." in prompt.text and "Ours." not in prompt.text
    assert "<|user|>first</s>" in prompt.text
    assert "<|user|>Solve: last\nBox it as \\boxed{}.</s><|assistant|>" in prompt.text
    [plain] = sampler(ListDataset("one", [item]), **settings).next(1)
    assert plain.text.startswith("<s><|system|>Ours.</s><|user|>Solve: last")


@pytest.mark.parametrize("text", ["no place", "{} and {}", "{name}", "{", "twice {0} {0}"])
def test_a_bad_prompt_template_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "template.txt").write_text(text)
    with pytest.raises(DataError, match="data.prompt_file"):
        sampler(prompt_file=tmp_path / "template.txt")


@pytest.mark.parametrize("key", ["prompt_file", "system_prompt_file"])
def test_a_missing_file_is_named(key: str) -> None:
    with pytest.raises(DataError, match=rf"data\.{key}.*no/such/file"):
        sampler(**{key: "no/such/file"})


def test_long_prompts_are_skipped_counted_and_never_cut(caplog: pytest.LogCaptureFixture) -> None:
    """T-10, T-11: by tokens, not characters; what is dealt is whole."""
    dataset = ListDataset("mixed", items("short", "x" * 100, "brief", "ü" * 20))
    short = len(sampler(ListDataset("one", items("short"))).next(1)[0].token_ids)
    with caplog.at_level(logging.WARNING):
        deck = sampler(dataset, max_input_seq_length=short + 10, max_epochs=2, shuffle=False)
        dealt = deck.next(100)
    assert places(dealt) == [(0, 0), (0, 2), (1, 0), (1, 2)]
    assert all("short" in p.text or "brief" in p.text for p in dealt)
    assert deck.skipped == 4
    assert f"over data.max_input_seq_length of {short + 10}" in caplog.text


def test_all_prompts_too_long_is_an_error_not_a_loop() -> None:
    with pytest.raises(DataError, match="all 10 prompts are longer than data.max_input_seq_length of 5"):
        sampler(max_input_seq_length=5).next(1)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(DataError, match="none: is empty"):
        sampler(ListDataset("none", []))


def test_each_epoch_deals_every_prompt_once_in_an_order_of_its_own() -> None:
    dealt = sampler().next(30)
    epochs = [[p.index for p in dealt if p.epoch == epoch] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert places(sampler().next(30)) == places(dealt)
    assert places(sampler(seed=2).next(30)) != places(dealt)
    assert places(sampler(shuffle=False).next(12)) == [(0, i) for i in range(10)] + [(1, 0), (1, 1)]


def test_epochs_end() -> None:
    deck = sampler(max_epochs=2)
    assert [len(deck.next(8)) for _ in range(4)] == [8, 8, 4, 0]


@pytest.mark.parametrize("taken", [0, 3, 10, 17, 20])
def test_a_position_resumes_exactly(taken: int) -> None:
    """C-01: the prompts after a restart are those of an uninterrupted run, skipped ones and epochs included."""
    dataset = ListDataset("mixed", items(*("p" * (1 + 7 * (i % 3)) + str(i) for i in range(10))))
    settings = {"max_input_seq_length": 16, "max_epochs": 4}
    whole, first = sampler(dataset, **settings), sampler(dataset, **settings)
    whole.next(taken)
    first.next(taken)
    resumed = sampler(dataset, **settings)
    resumed.restore(json.loads(json.dumps(first.state())))
    assert places(resumed.next(100)) == places(whole.next(100))
    assert resumed.skipped == whole.skipped > 0


@pytest.mark.parametrize(("field", "other"), [("seed", 2), ("shuffle", False), ("dataset", "else"), ("size", 9)])
def test_a_position_of_other_data_is_refused(field: str, other: object) -> None:
    state = {**sampler().state(), field: other}
    with pytest.raises(DataError, match=field):
        sampler().restore(state)
