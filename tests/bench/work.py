"""The work that both sides of the bench do. Imports the standard library only: TRL's environment runs it too."""

import json
import random
import zlib
from pathlib import Path
from typing import Any

PROMPTS_PER_STEP = 4
SAMPLES_PER_PROMPT = 8
NEW_TOKENS = 32
TOKENS_PER_STEP = PROMPTS_PER_STEP * SAMPLES_PER_PROMPT * NEW_TOKENS
LEARNING_RATE = 1e-6
SYSTEM_PROMPT = "Answer with just the number."


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Additions of two numbers with their answers, as rows of a JSONL file."""
    draw = random.Random(seed)
    pairs = [(draw.randint(10, 99), draw.randint(10, 99)) for _ in range(count)]
    return [
        {
            "messages": [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": f"State the final answer to the following arithmetic problem: {a} + {b} ="},
            ],
            "answer": str(a + b),
        }
        for a, b in pairs
    ]


def spread(text: str) -> float:
    """A reward in [0, 1) that differs between answers, so that every group has advantages and nobody may skip work."""
    return zlib.crc32(text.encode()) / 2**32


def write_rows(path: Path, count: int) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(count)), encoding="utf-8")


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
