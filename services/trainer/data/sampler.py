"""From a dataset to prompts as token ids, in an order that a checkpoint can resume exactly."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from services.trainer.data.base import DataError, Dataset, Item, Message, derived_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

# Of a tokenizer without a chat template (a base model): the prompt's text alone.
PASSTHROUGH = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class PromptSettings(Protocol):
    """The part of the `data` block that shapes prompts."""

    @property
    def max_input_seq_length(self) -> int | None: ...
    @property
    def prompt_file(self) -> Any: ...
    @property
    def system_prompt(self) -> str | None: ...
    @property
    def system_prompt_file(self) -> Any: ...
    @property
    def shuffle(self) -> bool: ...


@dataclass(frozen=True)
class PreparedPrompt:
    """One prompt ready to generate from. `token_ids` go to the engine as they are; `text` is for people.

    `index` is the item's place in the dataset, `epoch` counts from 0.
    """

    token_ids: list[int]
    text: str
    item: Item
    index: int
    epoch: int


class Renderer:
    """Conversations as token ids: system prompt, prompt template and chat template applied."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: PromptSettings) -> None:
        self._tokenizer = tokenizer
        self._system = _text("data.system_prompt_file", settings.system_prompt_file) or settings.system_prompt
        self._template = _template(_text("data.prompt_file", settings.prompt_file))
        self._chat_template = None if tokenizer.chat_template else PASSTHROUGH

    def conversation(self, messages: list[Message]) -> list[Message]:
        """The messages as the model sees them; a conversation's own system prompt wins over the configured one."""
        *before, last = messages
        if self._template is not None:
            last = {**last, "content": self._template.format(last["content"])}
        if self._system and not (before and before[0]["role"] == "system"):
            before = [{"role": "system", "content": self._system}, *before]
        return [*before, last]

    def render(self, messages: list[Message]) -> tuple[list[int], str]:
        """Token ids and their text. The chat template writes the special tokens, so the tokenizer adds none."""
        conversation = self.conversation(messages)
        template, apply = self._chat_template, self._tokenizer.apply_chat_template
        text = str(apply(conversation, chat_template=template, add_generation_prompt=True, tokenize=False))
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._one_bos([int(i) for i in ids]), text

    def _one_bos(self, ids: list[int]) -> list[int]:
        """Exactly one BOS for a model that wants one: templates of base models write none, some write two."""
        bos = self._tokenizer.bos_token_id
        if bos is None:
            return ids
        while ids[:2] == [bos, bos]:
            ids = ids[1:]
        if self._chat_template == PASSTHROUGH and ids[:1] != [bos] and self._adds_bos():
            ids = [bos, *ids]
        return ids

    def _adds_bos(self) -> bool:
        return self._tokenizer("")["input_ids"][:1] == [self._tokenizer.bos_token_id]


def _text(key: str, path: Any) -> str | None:
    if not path:
        return None
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise DataError(f"{key}: cannot read {path}: {error}") from error


def _template(text: str | None) -> str | None:
    """Checked once here, so that no prompt fails on it later."""
    if text is None:
        return None
    try:
        filled = text.format("\0")
    except (IndexError, KeyError, ValueError) as error:
        raise DataError(_TEMPLATE_HELP) from error
    if filled.count("\0") != 1:
        raise DataError(_TEMPLATE_HELP)
    return text


_TEMPLATE_HELP = "data.prompt_file: should hold {} once, where the prompt goes; other braces are written {{ and }}"


class PromptSampler:
    """Deals a dataset's prompts, shuffled anew each epoch, for at most `max_epochs` (None: without end).

    `skipped` counts the prompts left out because they exceed data.max_input_seq_length; they are never truncated.
    """

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        settings: PromptSettings,
        seed: int,
        *,
        max_epochs: int | None = None,
        shuffle: bool | None = None,
    ) -> None:
        if len(dataset) == 0:
            raise DataError(f"{dataset.name}: is empty")
        self._dataset, self._seed, self._max_epochs = dataset, seed, max_epochs
        self._shuffle = settings.shuffle if shuffle is None else shuffle
        self._limit = settings.max_input_seq_length
        self._renderer = Renderer(tokenizer, settings)
        self._epoch = self._position = self._dealt = 0
        self.skipped = 0
        self._order = self._order_of(0)

    @property
    def epoch(self) -> int:
        return self._epoch

    def next(self, count: int) -> list[PreparedPrompt]:
        """The next `count` prompts; fewer, in the end none, when the epochs are used up.

        Raises DataError when a whole epoch has no prompt that is short enough.
        """
        prompts: list[PreparedPrompt] = []
        while len(prompts) < count and not self._finished():
            prepared = self._advance()
            if prepared is not None:
                prompts.append(prepared)
        return prompts

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as JSON-able values."""
        return {
            "dataset": self._dataset.name,
            "size": len(self._dataset),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "epoch": self._epoch,
            "position": self._position,
            "dealt": self._dealt,
            "skipped": self.skipped,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state` was taken. Raises DataError when it belongs to other data or another seed."""
        now = self.state()
        for field in ("dataset", "size", "seed", "shuffle"):
            if state[field] != now[field]:
                raise DataError(
                    f"the checkpoint's data position is for {field}={state[field]!r}, this run has {now[field]!r}: "
                    "resume with the same data settings, or start a new run"
                )
        self._epoch, self._position = state["epoch"], state["position"]
        self._dealt, self.skipped = state["dealt"], state["skipped"]
        self._order = self._order_of(self._epoch)

    def _finished(self) -> bool:
        if self._position == len(self._order):
            self._next_epoch()
        return self._max_epochs is not None and self._epoch >= self._max_epochs

    def _next_epoch(self) -> None:
        if self._dealt == 0:
            raise DataError(
                f"{self._dataset.name}: all {len(self._order)} prompts are longer than data.max_input_seq_length "
                f"of {self._limit} tokens; raise it"
            )
        self._epoch, self._position, self._dealt = self._epoch + 1, 0, 0
        self._order = self._order_of(self._epoch)

    def _advance(self) -> PreparedPrompt | None:
        """The prompt at the position, which moves on; None when it is too long."""
        index = self._order[self._position]
        item = self._dataset[index]
        token_ids, text = self._renderer.render(item.messages)
        self._position += 1
        if self._limit is not None and len(token_ids) > self._limit:
            self.skipped += 1
            log.warning(
                "%s: prompt %d has %d tokens, over data.max_input_seq_length of %d: skipped (%d so far)",
                self._dataset.name, index, len(token_ids), self._limit, self.skipped,
            )  # fmt: skip
            return None
        self._dealt += 1
        return PreparedPrompt(token_ids, text, item, index, self._epoch)

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self._dataset)))
        if self._shuffle:
            random.Random(derived_seed(self._seed, "order", epoch)).shuffle(order)
        return order
