"""From the `data` block to datasets, and from `policy.tokenizer` to a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from services.trainer.data.base import DataError, Dataset, Item, Split
from services.trainer.data.holdout import ListDataset, choose, without
from services.trainer.data.huggingface import read_huggingface
from services.trainer.data.jsonl import read_jsonl
from services.trainer.data.reasoning_gym import PREFIX, ReasoningGymDataset
from services.trainer.data.rows import RowReader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What `data.dataset` may hold for files and Hugging Face datasets.
ROW_KEYS = ("prompt_key", "messages_key", "answer_key")
HUB_KEYS = ("subset", "train_split", "validation_split")


class DataSettings(Protocol):
    """The part of the `data` block that says where prompts come from."""

    @property
    def dataset_name(self) -> str: ...
    @property
    def dataset(self) -> Mapping[str, Any]: ...
    @property
    def train_file(self) -> Any: ...
    @property
    def validation_file(self) -> Any: ...
    @property
    def num_validation(self) -> int: ...
    @property
    def verifier(self) -> str | None: ...


class TokenizerSettings(Protocol):
    """The `policy.tokenizer` block."""

    @property
    def name(self) -> str: ...
    @property
    def chat_template(self) -> str | None: ...


def load_dataset(data: DataSettings, env: Mapping[str, Any], split: Split, seed: int) -> Dataset:
    """One split of the configured data; training never shares a prompt with validation.

    `env` gives each verifier's options by its name, `env.<verifier>.options`. Raises DataError.
    """
    if data.dataset_name.startswith(PREFIX):
        verifier = data.verifier or "reasoning_gym"
        return ReasoningGymDataset(
            data.dataset_name.removeprefix(PREFIX),
            data.dataset,
            split,
            seed,
            num_validation=data.num_validation,
            verifier=verifier,
            options=_options(env, verifier),
        )
    train, validation = _rows(data, env, seed)
    return ListDataset(data.dataset_name, validation if split == "validation" else train)


def _options(env: Mapping[str, Any], verifier: str) -> Mapping[str, Any]:
    return getattr(env.get(verifier), "options", None) or {}


def _rows(data: DataSettings, env: Mapping[str, Any], seed: int) -> tuple[list[Item], list[Item]]:
    """Training and validation items."""
    source = str(data.train_file or data.dataset_name)
    items = _source(source, data, env, str(data.dataset.get("train_split", "train")))
    if data.validation_file:
        held_out = _source(str(data.validation_file), data, env, "validation")[: data.num_validation or None]
    elif data.dataset.get("validation_split"):
        held_out = _source(source, data, env, data.dataset["validation_split"])[: data.num_validation or None]
    else:
        held_out = choose(items, data.num_validation, seed, source)
    return without(items, held_out, source), held_out


def _source(source: str, data: DataSettings, env: Mapping[str, Any], split: str) -> list[Item]:
    reader = _reader(source, data, env)
    if Path(source).suffix in (".jsonl", ".json"):
        return read_jsonl(Path(source), reader)
    return read_huggingface(source, data.dataset.get("subset"), split, reader)


def _reader(source: str, data: DataSettings, env: Mapping[str, Any]) -> RowReader:
    unknown = sorted(set(data.dataset) - {*ROW_KEYS, *HUB_KEYS})
    if unknown:
        known = ", ".join((*ROW_KEYS, *HUB_KEYS))
        raise DataError(f'data.dataset: "{unknown[0]}" means nothing for {source}; known: {known}')
    keys = {k: str(data.dataset[k]) for k in ROW_KEYS if k in data.dataset}
    options = {name: dict(_options(env, name)) for name in env}
    return RowReader(source, verifier=data.verifier or "math", options=options, **keys)


def load_tokenizer(settings: TokenizerSettings) -> PreTrainedTokenizerBase:
    """The tokenizer with its chat template: its own (null or "default"), a .jinja file, or a template given in full.

    Raises DataError when it cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(settings.name)
    except Exception as error:  # transformers and the hub below it raise dozens of types
        raise DataError(
            f'policy.tokenizer.name: cannot load "{settings.name}" ({type(error).__name__}: {error}); '
            "give a folder with tokenizer files or a name on the hub"
        ) from error
    template = chat_template(settings.chat_template)
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer  # type: ignore[no-any-return]


def chat_template(setting: str | None) -> str | None:
    """The template text that `policy.tokenizer.chat_template` means; None for the tokenizer's own."""
    if setting is None or setting.strip().lower() == "default":
        return None
    if not setting.strip().endswith(".jinja"):
        return setting
    try:
        return Path(setting.strip()).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"policy.tokenizer.chat_template: cannot read {setting}: {error}") from error
