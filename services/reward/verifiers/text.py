"""Finding the answer in a response: shared by the verifiers, pure string work in linear time."""

from __future__ import annotations

import re
from typing import Literal

Extraction = Literal["raw", "last_line", "answer_tags"]

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
_END = re.compile("|".join(re.escape(t) for t in END_TOKENS))


def strip_end_tokens(text: str) -> str:
    """`text` without the text of end-of-sequence tokens; a blank keeps what stood around one apart."""
    return _END.sub(" ", text).rstrip() if _END.search(text) else text


def extract(text: str, how: Extraction) -> str | None:
    """The answer in `text`, stripped; None when there is none (an empty response, no <answer> pair)."""
    if how == "answer_tags":
        return last_tag(text, "answer")
    stripped = text.strip()
    if how == "last_line" and stripped:
        stripped = stripped.splitlines()[-1].strip()
    return stripped or None


def last_tag(text: str, tag: str) -> str | None:
    """What stands in the last closed <tag>...</tag>, stripped."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return text[start + len(tag) + 2 : end].strip() if end >= 0 and start >= 0 else None


def last_boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{...} or \fbox{...} whose braces balance; None when there is none."""
    found = None
    for match in re.finditer(r"\\(?:boxed|fbox)\s*\{", text):
        end = closing_brace(text, match.end() - 1)
        if end is not None:
            found = text[match.end() : end].strip()
    return found


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
