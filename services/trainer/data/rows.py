"""From a row of a file to an Item, with one set of complaints for all file formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.trainer.data.base import DataError, Item, Message, Task

RIGHT = (
    'a row is an object with "prompt" (text) or "messages" (a list of {"role", "content"}), "answer", '
    'and optionally "verifier" and "payload"'
)
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class RowReader:
    """source: for messages about bad rows. verifier: for rows that name none. options: by verifier, for its payloads.
    The keys say where prompt and answer stand, for files that call them something else."""

    source: str
    verifier: str
    options: Mapping[str, Mapping[str, Any]]
    prompt_key: str = "prompt"
    messages_key: str = "messages"
    answer_key: str = "answer"

    def item(self, row: object, index: int, number: int) -> Item:
        """The item of a row; `number` (from 1) is what an error names. Raises DataError."""
        where = f"{self.source}, row {number}"
        if not isinstance(row, Mapping):
            raise DataError(f"{where}: is a {type(row).__name__}; {RIGHT}")
        return Item(self._messages(row, where), self._task(row, where), index)

    def _messages(self, row: Mapping[str, Any], where: str) -> list[Message]:
        prompt, messages = row.get(self.prompt_key), row.get(self.messages_key)
        if (prompt is None) == (messages is None):
            which = "neither" if prompt is None else "both"
            raise DataError(f'{where}: has {which} of "{self.prompt_key}" and "{self.messages_key}"; {RIGHT}')
        if prompt is not None:
            if not isinstance(prompt, str) or not prompt.strip():
                raise DataError(f'{where}: "{self.prompt_key}" should be text that is not empty')
            _check_text(prompt, f'{where}: "{self.prompt_key}"')
            return [{"role": "user", "content": prompt}]
        return conversation(messages, f'{where}: "{self.messages_key}"')

    def _task(self, row: Mapping[str, Any], where: str) -> Task:
        verifier, extra = row.get("verifier", self.verifier), row.get("payload") or {}
        if not isinstance(verifier, str) or not verifier:
            raise DataError(f'{where}: "verifier" should be the name of one; or set data.verifier for all rows')
        if not isinstance(extra, Mapping):
            raise DataError(f'{where}: "payload" should be an object')
        answer = row.get(self.answer_key)
        if answer is None and not extra:
            raise DataError(f'{where}: has no "{self.answer_key}"; {RIGHT}')
        if isinstance(answer, str) and not answer.strip():
            raise DataError(f'{where}: "{self.answer_key}" is empty')
        given = {} if answer is None else {"answer": answer}
        return Task(verifier, {**given, **self.options.get(verifier, {}), **extra})


def _check_text(text: str, where: str) -> None:
    """JSON can escape half of a character outside of Unicode's first plane, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where} has half a surrogate pair at character {error.start}, which is no text") from error


def conversation(messages: object, where: str) -> list[Message]:
    """`messages` checked: roles and text, ending with the user. Raises DataError."""
    if not isinstance(messages, list | tuple) or not messages:
        raise DataError(f'{where} should be a list of {{"role", "content"}} that is not empty')
    checked = []
    for message in messages:
        role = message.get("role") if isinstance(message, Mapping) else None
        content = message.get("content") if isinstance(message, Mapping) else None
        if role not in ROLES or not isinstance(content, str):
            raise DataError(f'{where}: each needs a "role" of {", ".join(ROLES)} and a "content" of text')
        _check_text(content, where)
        checked.append({"role": role, "content": content})
    if checked[-1]["role"] != "user":
        raise DataError(f"{where} should end with the user's turn, which the model answers")
    return checked
