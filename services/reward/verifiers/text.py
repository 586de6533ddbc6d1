"""Finding the answer in a response: shared by the verifiers, pure string work in linear time."""

from __future__ import annotations

import re
from typing import Literal

Extraction = Literal["raw", "last_line", "last_number", "answer_tags"]

# End-of-sequence texts of the model families in use. A detokenizer that keeps special tokens leaves them in the
# response; an answer must not change because of them.
END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|return|>",
    "<|endofturn|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<eos>",
    "</s>",
    "<｜end▁of▁sentence｜>",  # noqa: RUF001 (DeepSeek writes it with full-width bars)
)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is text
_END = re.compile("|".join(re.escape(t) for t in END_TOKENS))
# A minus counts as a sign only where no operand stands before it: "7 - 3" ends in 3, "is -3" in -3.
_NUMBER = re.compile(r"(?:(?<![\w)\]])-)?\d+(?:,\d{3})*(?:\.\d+)?")


def strip_end_tokens(text: str) -> str:
    """`text` without the text of end-of-sequence tokens; a blank keeps what stood around one apart."""
    return _END.sub(" ", text).rstrip() if _END.search(text) else text


def extract(text: str, how: Extraction) -> str | None:
    """The answer in `text`, stripped; None when there is none (an empty response, no <answer> pair)."""
    if how == "answer_tags":
        return last_tag(text, "answer")
    if how == "last_number":
        return last_number(text)
    stripped = text.strip()
    if how == "last_line" and stripped:
        stripped = stripped.splitlines()[-1].strip()
    return stripped or None


def last_number(text: str) -> str | None:
    """The last number in the text, without thousands commas; None when there is none."""
    numbers: list[str] = _NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None


def last_tag(text: str, tag: str) -> str | None:
    """What stands in the last closed <tag>...</tag>, stripped."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return text[start + len(tag) + 2 : end].strip() if end >= 0 and start >= 0 else None


def last_boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{...} or \fbox{...} whose braces balance; None when there is none.

    One pass over the text, however many boxes are begun and never closed.
    """
    boxes = {match.end() - 1 for match in _BOX.finditer(text)}
    opened: list[int] = []
    last: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):
        at = match.start()
        if match[0] == "{":
            opened.append(at)
        elif match[0] == "}" and opened:
            start = opened.pop()
            if start in boxes and (last is None or start > last[0]):
                last = (start, at)
    return text[last[0] + 1 : last[1]].strip() if last else None


def has_box(text: str) -> bool:
    """Whether a box was begun, closed or not."""
    return re.search(r"\\(?:boxed|fbox)\b", text) is not None


def closing_brace(text: str, start: int, pair: str = "{}") -> int | None:
    """Where the bracket at `start` closes; backslash-escaped brackets do not count. None when it never does."""
    depth, i = 0, start
    while i < len(text):
        if text[i] == "\\":
            i += 1  # the next character is escaped
        elif text[i] == pair[0]:
            depth += 1
        elif text[i] == pair[1]:
            depth -= 1
            if depth == 0:
                return i
        i += 1
    return None


def after_hashes(text: str) -> str | None:
    """GSM8K's final answer: the line after the last `####`, without `$`, thousands commas and a full stop."""
    if "####" not in text:
        return None
    line = text.rsplit("####", 1)[1].strip().split("\n", 1)[0]
    line = line.strip().lstrip("$").rstrip(".").strip()
    return re.sub(r"(?<=\d),(?=\d{3}\b)", "", line) or None
