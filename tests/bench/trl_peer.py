"""TRL's GRPOTrainer on the bench's work, in TRL's own environment; the last line of its output is JSON.

Settings are the ones kindest to it here: no reference model, no gradient checkpointing (its default costs about a
fifth), one pass over all samples, the same dtype as ours.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parent))
from work import LEARNING_RATE, NEW_TOKENS, PROMPTS_PER_STEP, SAMPLES_PER_PROMPT, TOKENS_PER_STEP, read_rows, spread


class Timed(GRPOTrainer):
    """Adds up the seconds of the phases that TRL's methods mark."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seconds = {"generation": 0.0, "reward": 0.0}
        self.generated = 0

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = super()._generate_single_turn(*args, **kwargs)
        self.seconds["generation"] += time.perf_counter() - started
        self.generated += sum(len(ids) for ids in result[0])
        return result

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = super()._calculate_rewards(*args, **kwargs)
        self.seconds["reward"] += time.perf_counter() - started
        return result


class Clock(TrainerCallback):
    """A record of each step: its seconds and the tokens that it generated."""

    def __init__(self) -> None:
        self.trainer: Timed | None = None
        self.steps: list[dict[str, float]] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        assert self.trainer is not None
        self.trainer.seconds = {"generation": 0.0, "reward": 0.0}
        self.trainer.generated = 0
        self._started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        assert self.trainer is not None
        total = time.perf_counter() - self._started
        phases = self.trainer.seconds
        training = total - phases["generation"] - phases["reward"]
        step = {"total": total, **phases, "training": training, "tokens": float(self.trainer.generated)}
        self.steps.append(step)
        print(f"TRL step {len(self.steps)}: {step}", flush=True)


def reward(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    return [spread(completion[0]["content"]) for completion in completions]


def settings(folder: str, precision: str, steps: int) -> GRPOConfig:
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=precision == "bfloat16",
        beta=0.0,
        learning_rate=LEARNING_RATE,
        max_steps=steps,
        per_device_train_batch_size=PROMPTS_PER_STEP * SAMPLES_PER_PROMPT,
        gradient_accumulation_steps=1,
        num_generations=SAMPLES_PER_PROMPT,
        max_completion_length=NEW_TOKENS,
        generation_kwargs={"min_new_tokens": NEW_TOKENS},
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        model_init_kwargs={"dtype": precision},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--precision", choices=("bfloat16", "float32"), required=True)
    parser.add_argument("--steps", type=int, required=True, help="measured steps, after one that is not")
    parser.add_argument("--threads", type=int, required=True)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    prompts = [{"prompt": row["messages"], "answer": row["answer"]} for row in read_rows(given.rows)]
    clock = Clock()
    with TemporaryDirectory() as folder:
        clock.trainer = Timed(
            model=given.model,
            reward_funcs=reward,
            args=settings(folder, given.precision, given.steps + 1),
            train_dataset=Dataset.from_list(prompts),
            processing_class=AutoTokenizer.from_pretrained(given.model, padding_side="left"),
            callbacks=[clock],
        )
        clock.trainer.train()
    measured = clock.steps[1:]
    if any(step["tokens"] != TOKENS_PER_STEP for step in measured):
        raise SystemExit(f"TRL generated {[s['tokens'] for s in measured]} tokens a step, not {TOKENS_PER_STEP}")
    print(json.dumps({name: median(step[name] for step in measured) for name in measured[0]}))


if __name__ == "__main__":
    main()
