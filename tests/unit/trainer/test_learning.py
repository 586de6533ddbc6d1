"""The learner against the clipped objective in plain float64: baseline, ratio, gradient and SGD written out here."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.trainer.assembly import Group, Member
from services.trainer.backends.base import Objective, StepResult
from services.trainer.batch import Batch
from services.trainer.learning import Learned, Learner
from services.trainer.objectives.build import build_objective
from tests.unit.trainer.builders import TEMPERATURE, sample
from trireme.config import load_config
from trireme.contracts import rewards
from trireme.contracts.v1 import sample_pb2

Table = NDArray[np.float64]  # [V, V]: row of the token before, column of the token itself
VOCAB, LEARNING_RATE, CLIP, BETA = 8, 3.0, 0.2, 0.1
PROMPTS, SIZE = 2, 4
NOISE = 0.15  # between the engine's log-probs and the trainer's
TABLE: Table = np.random.default_rng(0).normal(size=(VOCAB, VOCAB))
REFERENCE: Table = TABLE + 0.3 * np.random.default_rng(1).normal(size=(VOCAB, VOCAB))
SCORES = [1.0, 0.0, 0.25, 0.0, 0.0, 1.0, 1.0, 0.5]


class FakeBackend:
    """A bigram model with plain SGD in place of a language model with Adam: its log-probs follow its weights."""

    def __init__(self) -> None:
        self.table = torch.tensor(TABLE, requires_grad=True)
        self.asked: list[str] = []
        self.steps: list[tuple[Batch, StepResult]] = []

    def log_probs(self, batch: Batch, which: Literal["policy", "reference"] = "policy") -> Tensor:
        self.asked.append(which)
        return self._forward(batch, self.table if which == "policy" else torch.tensor(REFERENCE)).detach()

    def step(self, batch: Batch, objective: Objective) -> StepResult:
        log_probs = self._forward(batch, self.table)
        loss, metrics = objective(log_probs, batch, batch.normalizer())
        (gradient,) = torch.autograd.grad(loss, self.table)
        with torch.no_grad():
            self.table -= LEARNING_RATE * gradient
        values = {name: float(value) for name, value in metrics.items()}
        norm = float(gradient.norm())
        self.steps.append(
            (batch, StepResult(float(loss.detach()), norm, LEARNING_RATE, log_probs.detach(), values, True))
        )
        return self.steps[-1][1]

    def _forward(self, batch: Batch, table: Tensor) -> Tensor:
        rows = (table[batch.tokens.roll(1)] / TEMPERATURE).log_softmax(-1)
        chosen = rows.gather(1, batch.tokens[:, None])[:, 0].float()
        return chosen.index_fill(0, batch.starts, 0.0)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        raise AssertionError("the learner publishes nothing")

    def save(self, directory: Path) -> Future[None]:
        raise AssertionError("the learner saves nothing")

    def restore(self, directory: Path) -> None:
        raise AssertionError("the learner restores nothing")


@dataclass
class Step:
    """What one optimizer step should come to."""

    loss: float
    mean_ratio: float
    on_policy_loss: float  # with a ratio of 1 at every token


def log_prob(table: Table, before: int, token: int) -> float:
    logits = [value / TEMPERATURE for value in table[before]]
    return logits[token] - math.log(sum(math.exp(logit) for logit in logits))


def transitions(one: sample_pb2.Sample) -> list[tuple[int, int]]:
    """(token before, token) of each token of the response."""
    tokens = [one.prompt_token_ids[-1], *one.response_token_ids]
    return list(itertools.pairwise(tokens))


def leave_one_out(scores: Sequence[float]) -> list[float]:
    """The reward less the mean reward of the others in the group."""
    return [score - (sum(scores) - score) / (len(scores) - 1) for score in scores]


def optimise(samples: Sequence[sample_pb2.Sample], gains: Sequence[float], size: int) -> list[Step]:
    """Steps of `size` samples each on the clipped objective, whose old policy is the one before the first of them."""
    table, result = TABLE.copy(), []
    for start in range(0, len(samples), size):
        part = list(zip(samples[start : start + size], gains[start : start + size], strict=True))
        count = sum(len(one.response_token_ids) for one, _ in part)
        gradient, step = np.zeros_like(table), Step(0.0, 0.0, 0.0)
        for one, gain in part:
            for before, token in transitions(one):
                ratio = math.exp(log_prob(table, before, token) - log_prob(TABLE, before, token))
                plain, clipped = ratio * gain, min(max(ratio, 1 - CLIP), 1 + CLIP) * gain
                step.loss -= min(plain, clipped) / count
                step.mean_ratio += ratio / count
                step.on_policy_loss -= gain / count
                if plain <= clipped:  # else the clip took the gradient away
                    slope = [(v == token) - math.exp(log_prob(table, before, v)) for v in range(VOCAB)]
                    gradient[before] -= plain / count * np.array(slope) / TEMPERATURE
        table -= LEARNING_RATE * gradient
        result.append(step)
    return result


def responses(scores: Sequence[float | None] = SCORES, **fields: Any) -> list[sample_pb2.Sample]:
    """A step's samples, ragged, as an engine gave them whose log-probs are off by +-NOISE. Score None: masked."""
    rng, result = np.random.default_rng(2), []
    for number, score in enumerate(scores):
        group, index = divmod(number, SIZE)
        tokens = rng.integers(0, VOCAB, 3 + number % 3).tolist()
        one = sample(f"g{group}", index, size=SIZE, prompt=(1, group), response=tokens, score=score, **fields)
        exact = [log_prob(TABLE, before, token) for before, token in transitions(one)]
        one.log_probs[:] = [value - NOISE * (-1) ** place for place, value in enumerate(exact)]
        result.append(one)
    return result


def grouped(samples: Sequence[sample_pb2.Sample]) -> list[Group]:
    groups: dict[str, Group] = {}
    for one in samples:
        group = groups.setdefault(one.group_id, Group(one.group_id, one.group_size))
        group.members[one.group_index] = Member(one.group_index, one)
    return list(groups.values())


def learn(
    tmp_path: Path, groups: Sequence[Group], *overrides: str, batch: int = PROMPTS * SIZE
) -> tuple[FakeBackend, Learned]:
    """One step of RLOO with the clip of PPO, `batch` samples to an optimizer step."""
    text = {
        "grpo": {
            "num_prompts_per_step": PROMPTS,
            "num_generations_per_prompt": SIZE,
            "normalize_rewards": False,
            "use_leave_one_out_baseline": True,
        },
        "loss_fn": {"reference_policy_kl_penalty": 0.0, "ratio_clip_min": CLIP, "ratio_clip_max": CLIP},
        "policy": {
            "model_name": "none",
            "train_global_batch_size": batch,
            "train_micro_batch_size": 1,
            "megatron_cfg": {"enabled": True},
            "max_total_sequence_length": 64,
            "generation": {"max_new_tokens": 8, "temperature": TEMPERATURE},
        },
        "data": {"dataset_name": "reasoning_gym/chain_sum"},
        "reward": {"policy_failure_score": -1.0},
    }
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(text))
    config, backend = load_config(path, overrides), FakeBackend()
    return backend, Learner(config, backend, build_objective(config.loss_fn)).learn(groups, version=1)


GAINS = leave_one_out(SCORES[:SIZE]) + leave_one_out(SCORES[SIZE:])


class TestOptimizerSteps:
    @pytest.mark.parametrize("size", [8, 4, 2])
    def test_each_is_that_of_the_formula(self, tmp_path: Path, size: int) -> None:
        """P-16: from the second step on the ratio is that to the policy before the first, not to the newest one."""
        samples = responses()
        backend, learned = learn(tmp_path, grouped(samples), batch=size)
        expected = optimise(samples, GAINS, size)
        got = [result for _, result in backend.steps]
        assert [one.loss for one in got] == pytest.approx([one.loss for one in expected], abs=1e-5)
        ratios = [one.metrics["probs_ratio"] for one in got]
        assert ratios == pytest.approx([one.mean_ratio for one in expected], abs=1e-5)
        assert learned.metrics["train/loss"] == pytest.approx(
            sum(one.loss for one in expected) / len(expected), abs=1e-5
        )
        # A ratio of 1 throughout, as of a policy compared with itself, would show.
        assert all(abs(one.loss - one.on_policy_loss) > 1e-3 for one in expected[1:])

    @pytest.mark.parametrize("size", [8, 4, 2])
    def test_they_take_the_samples_in_order_each_once(self, tmp_path: Path, size: int) -> None:
        samples = responses()
        backend, _ = learn(tmp_path, grouped(samples), batch=size)
        assert [len(batch) for batch, _ in backend.steps] == [size] * (len(samples) // size)
        tokens = [token for batch, _ in backend.steps for token in batch.tokens.tolist()]
        assert tokens == [t for one in samples for t in (*one.prompt_token_ids, *one.response_token_ids)]

    def test_the_policy_is_scored_once_and_only_if_its_old_self_is_needed(self, tmp_path: Path) -> None:
        assert learn(tmp_path, grouped(responses()), batch=8)[0].asked == []
        assert learn(tmp_path, grouped(responses()), batch=2)[0].asked == ["policy"]

    def test_the_reference_enters_the_loss(self, tmp_path: Path) -> None:
        """k3 of Schulman, exp(d) - 1 - d with d = log p_reference - log p_policy, at a policy of ratio 1."""
        samples = responses()
        penalty = f"loss_fn.reference_policy_kl_penalty={BETA}"
        backend, _ = learn(tmp_path, grouped(samples), penalty)
        steps = [pair for one in samples for pair in transitions(one)]
        gaps = [log_prob(REFERENCE, *pair) - log_prob(TABLE, *pair) for pair in steps]
        divergence = sum(math.exp(d) - 1 - d for d in gaps) / len(gaps)
        ((_, result),) = backend.steps
        assert backend.asked == ["reference"]
        assert result.metrics["kl_penalty"] == pytest.approx(divergence, abs=1e-5)
        on_policy = optimise(samples, GAINS, len(samples))[0].loss
        assert result.loss == pytest.approx(on_policy + BETA * divergence, abs=1e-5)


class TestMismatch:
    @pytest.mark.parametrize("size", [8, 2])
    def test_is_measured_before_the_first_update(self, tmp_path: Path, size: int) -> None:
        """P-01: the engine sampled from these weights; what the steps themselves changed is no mismatch."""
        backend, learned = learn(tmp_path, grouped(responses()), batch=size)
        signs = [(-1) ** place for one in responses() for place in range(len(one.response_token_ids))]
        divergence = sum(math.exp(NOISE * sign) - 1 - NOISE * sign for sign in signs) / len(signs)
        assert learned.metrics["train/token_mult_prob_error"] == pytest.approx(math.exp(NOISE), abs=1e-5)
        assert learned.metrics["train/token_mult_prob_error_max"] == pytest.approx(math.exp(NOISE), abs=1e-5)
        assert learned.metrics["train/gen_kl_error"] == pytest.approx(divergence, abs=1e-5)
        batch, result = backend.steps[-1]
        if size < 8:  # the log-probs of the later steps would tell another story
            moved = (result.log_probs - batch.generation_log_probs)[batch.loss_mask].abs().exp()
            assert abs(float(moved.mean()) - math.exp(NOISE)) > 0.02


class TestMasked:
    def test_infrastructure_failures_enter_neither_baseline_nor_loss(self, tmp_path: Path) -> None:
        """R-28: the step is the one of the other samples alone."""
        scores: list[float | None] = [1.0, None, 0.25, 0.0, None, 1.0, 1.0, 0.5]
        samples = responses(scores)
        backend, learned = learn(tmp_path, grouped(samples))
        valid = [one for one, score in zip(samples, scores, strict=True) if score is not None]
        gains = leave_one_out([1.0, 0.25, 0.0]) + leave_one_out([1.0, 1.0, 0.5])
        ((batch, result),) = backend.steps
        assert len(batch) == len(valid)
        assert result.loss == pytest.approx(optimise(valid, gains, len(valid))[0].loss, abs=1e-5)
        assert batch.advantages[batch.loss_mask].tolist() == pytest.approx(
            [gain for one, gain in zip(valid, gains, strict=True) for _ in one.response_token_ids]
        )
        assert learned.metrics["train/masked_samples"] == 2
        assert learned.metrics["train/reward"] == pytest.approx(3.75 / 6)

    def test_a_place_that_stayed_empty_is_nobodys_zero(self, tmp_path: Path) -> None:
        samples = responses()
        groups = grouped(samples)
        groups[0].members[1] = Member(1, None, note="delivered 4 times")
        backend, learned = learn(tmp_path, groups)
        gains = leave_one_out([1.0, 0.25, 0.0]) + GAINS[SIZE:]
        rest = [one for one in samples if one is not samples[1]]
        assert backend.steps[0][1].loss == pytest.approx(optimise(rest, gains, len(rest))[0].loss, abs=1e-5)
        assert learned.rewards == [1.0, 0.25, 0.0, *SCORES[SIZE:]]
        assert learned.metrics["train/masked_samples"] == 1

    def test_what_is_left_is_dealt_evenly_to_the_optimizer_steps(self, tmp_path: Path) -> None:
        """Cut off by fours, the last of five samples would have a step, and Adam's whole learning rate, to itself."""
        backend, _ = learn(tmp_path, grouped(responses([1.0, None, 0.25, 0.0, None, 1.0, 0.5, None])), batch=4)
        assert [len(batch) for batch, _ in backend.steps] == [3, 2]

    @pytest.mark.parametrize("why", ["failed", "overlong"])
    def test_without_a_sample_to_train_on_no_step_is_taken(self, tmp_path: Path, why: str) -> None:
        """An optimizer with momentum would move the weights even for a gradient of zeros."""
        if why == "failed":
            samples, overrides = responses([None] * 8), []
        else:
            samples = responses(finish_reason=sample_pb2.FINISH_REASON_LENGTH)
            overrides = ["grpo.overlong_filtering=true"]
        backend, learned = learn(tmp_path, grouped(samples), *overrides, batch=2)
        assert backend.steps == [] and backend.asked == []
        assert np.array_equal(backend.table.detach().numpy(), TABLE)
        assert learned.metrics["train/masked_samples"] == (8 if why == "failed" else 0)
        assert learned.metrics["train/trained_tokens"] == 0
        assert "train/loss" not in learned.metrics
        assert learned.applied is None


def test_rewards_stand_beside_their_samples(tmp_path: Path) -> None:
    """Raw rewards in the order of `samples`, whatever the order of arrival: None is unknown, never 0."""
    samples = responses()
    for index, outcome in (
        (2, rewards.infrastructure_failure("timeout", 3, verifier="t")),
        (5, rewards.policy_failure("malformed", verifier="t")),
    ):
        samples[index].reward.CopyFrom(outcome)
    _, learned = learn(tmp_path, grouped(samples[::-1]))
    got = {one.id: reward for one, reward in zip(learned.samples, learned.rewards, strict=True)}
    assert got == {one.id: reward for one, reward in zip(samples, [1, 0, None, 0, 0, -1, 1, 0.5], strict=True)}
