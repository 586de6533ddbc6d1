"""Objectives against papers' formulas in plain floats, against TRL's formulas on padded tensors, and by themselves."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.trainer.batch import Batch
from services.trainer.objectives.base import ConstantLength
from services.trainer.objectives.build import build_objective
from tests.unit.trainer import reference
from tests.unit.trainer.builders import batch_of, current_log_probs, loss_config
from trireme.config.blocks.loss_fn import LossConfig

RAGGED = [[True] * 5, [True], [True, True, False, False, True], [True, False, True]]


def evaluate(
    config: LossConfig, batch: Batch, log_probs: Tensor, **options: Any
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, gradient and metrics of a batch as one micro-batch."""
    leaf = log_probs.detach().clone().requires_grad_()
    loss, metrics = build_objective(config, **options)(leaf, batch, batch.normalizer())
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient, metrics


def one_token(*, advantage: float, ratio: float, **keys: Any) -> tuple[float, float]:
    """Loss and d loss / d lp of a single trained token whose policy has moved by `ratio`."""
    batch = batch_of([[True]], advantages=[advantage])
    assert batch.old_log_probs is not None
    log_probs = batch.old_log_probs + torch.where(batch.loss_mask, torch.tensor(ratio).log(), torch.tensor(0.0))
    loss, gradient, _ = evaluate(loss_config(**keys), batch, log_probs)
    return float(loss), float(gradient[-1])


CONFIGS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "asymmetric": {"ratio_clip_min": 0.1, "ratio_clip_max": 0.3},
    "dual clip": {"ratio_clip_c": 1.1},
    "per sequence": {"token_level_loss": False},
    "gspo": {"sequence_level_importance_ratios": True, "token_level_loss": False, "ratio_clip_min": 0.01},
    "reinforce": {"disable_ppo_ratio": True},
    "on-policy": {"force_on_policy_ratio": True},
    "corrected": {"use_importance_sampling_correction": True},
    "tis": {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "tis",
        "truncated_importance_sampling_ratio": 1.1,
    },
    "icepop": {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "icepop",
        "truncated_importance_sampling_ratio": 1.2,
        "truncated_importance_sampling_ratio_min": 0.8,
    },
    "seq-mask-tis": {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "seq-mask-tis",
        "truncated_importance_sampling_ratio": 1.1,
        "truncated_importance_sampling_ratio_min": 0.9,
    },
    "gspo corrected": {
        "sequence_level_importance_ratios": True,
        "token_level_loss": False,
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "tis",
        "truncated_importance_sampling_ratio": 1.05,
    },
    "k1": {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": "k1"},
    "k2": {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": "k2"},
    "k3": {"reference_policy_kl_penalty": 0.1},
    "k3 weighted": {"reference_policy_kl_penalty": 0.1, "use_on_policy_kl_approximation": True},
}


@pytest.mark.parametrize("stored_old", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradient_equal_plain_floats(name: str, stored_old: bool) -> None:
    """L-18 (GSPO by sequence), T-09 (untrained tokens inside a response), against finite differences of the formula."""
    config = loss_config(**CONFIGS[name])
    for seed in range(5):
        batch = batch_of(RAGGED, seed=seed)
        log_probs = current_log_probs(batch, seed + 100)
        if not stored_old:
            batch = replace(batch, old_log_probs=None)
        loss, gradient, _ = evaluate(config, batch, log_probs)
        floats = log_probs.detach().double().tolist()
        assert float(loss) == pytest.approx(reference.loss(floats, floats, batch, config), abs=2e-6)
        assert gradient.tolist() == pytest.approx(reference.gradient(batch, floats, config), abs=2e-6)


def test_cispo_weights_the_log_prob_by_a_held_ratio() -> None:
    """-A sg(clip(r)) lp: the gradient is -A clip(r) / N at every token, also where the clip acts."""
    batch = batch_of(RAGGED, seed=3)
    log_probs = current_log_probs(batch, spread=0.6).detach()
    loss, gradient, metrics = evaluate(loss_config(use_cispo=True), batch, log_probs)
    expected_loss, expected_gradient = 0.0, [0.0] * len(log_probs)
    count = int(batch.loss_mask.sum())
    clipped = 0
    for tokens in reference.trained_tokens(batch):
        for t in tokens:
            lp, old = float(log_probs[t.position]), t.old
            assert old is not None
            ratio = 2.718281828459045 ** (lp - old)
            held = min(max(ratio, 0.8), 1.2)
            clipped += held != ratio
            expected_loss += -t.advantage * held * lp / count
            expected_gradient[t.position] = -t.advantage * held / count
    assert clipped > 3
    assert float(loss) == pytest.approx(expected_loss, abs=1e-6)
    assert gradient.tolist() == pytest.approx(expected_gradient, abs=1e-6)
    assert float(metrics["probs_ratio_clamped"]) < 1.2


class TestClip:
    def test_dual_clip_bounds_a_bad_token(self) -> None:
        """A = -1, r = 5, c = 3 gives 3, without a gradient; without c it gives 5 with one."""
        assert one_token(advantage=-1.0, ratio=5.0, ratio_clip_c=3.0) == (pytest.approx(3.0), 0.0)
        assert one_token(advantage=-1.0, ratio=5.0) == (pytest.approx(5.0), pytest.approx(5.0))

    def test_dual_clip_leaves_good_tokens_alone(self) -> None:
        assert one_token(advantage=1.0, ratio=1.1, ratio_clip_c=3.0)[0] == pytest.approx(-1.1)

    @pytest.mark.parametrize(
        ("advantage", "ratio", "moves"),
        [(1.0, 1.5, False), (1.0, 0.5, True), (-1.0, 0.5, False), (-1.0, 1.5, True), (1.0, 1.1, True)],
    )
    def test_the_gradient_vanishes_only_beyond_what_was_asked(
        self, advantage: float, ratio: float, moves: bool
    ) -> None:
        assert (one_token(advantage=advantage, ratio=ratio)[1] != 0) == moves

    def test_the_clip_is_asymmetric(self) -> None:
        keys = {"ratio_clip_min": 0.1, "ratio_clip_max": 0.4}
        assert one_token(advantage=1.0, ratio=2.0, **keys)[0] == pytest.approx(-1.4)
        assert one_token(advantage=-1.0, ratio=0.5, **keys)[0] == pytest.approx(0.9)

    def test_clip_fractions_are_of_tokens_without_gradient(self) -> None:
        batch = batch_of([[True], [True], [True]], advantages=[1.0, 1.0, -1.0])
        assert batch.old_log_probs is not None
        moved = torch.zeros(9)
        moved[[2, 5, 8]] = torch.tensor([1.5, 1.0, 0.5]).log()
        _, gradient, metrics = evaluate(loss_config(), batch, batch.old_log_probs + moved)
        assert float(metrics["clip_fraction_high"]) == pytest.approx(1 / 3)
        assert float(metrics["clip_fraction_low"]) == pytest.approx(1 / 3)
        assert (gradient != 0).tolist() == [False] * 5 + [True] + [False] * 3

    def test_an_overflowing_ratio_does_not_poison_a_neutral_token(self) -> None:
        """0 * exp(1000) would be nan."""
        batch = batch_of([[True]], advantages=[0.0])
        loss, gradient, _ = evaluate(loss_config(), batch, torch.full((3,), 1000.0))
        assert float(loss) == 0
        assert torch.isfinite(gradient).all()


def mean_ratio(batch: Batch, upper: Tensor, lower: Tensor, *, by_sequence: bool) -> float:
    """Mean of exp(upper - lower) over trained tokens, or over sequences of exp of its mean log, in plain floats."""
    above, below = upper.tolist(), lower.tolist()
    gaps = [[above[t.position] - below[t.position] for t in one] for one in reference.trained_tokens(batch)]
    logs = [sum(one) / len(one) for one in gaps] if by_sequence else [gap for one in gaps for gap in one]
    return sum(math.exp(one) for one in logs) / len(logs)


class TestOnPolicy:
    @pytest.mark.parametrize("keys", [{}, {"sequence_level_importance_ratios": True, "token_level_loss": False}])
    def test_without_stored_log_probs_the_current_ones_are_the_old(self, keys: dict[str, Any]) -> None:
        """P-15: the first update compares the policy with itself, and the engine with this policy, bit for bit."""
        stored = batch_of(RAGGED)
        log_probs, config = current_log_probs(stored), loss_config(**keys)
        itself = evaluate(config, stored.with_log_probs(old=log_probs.detach()), log_probs)
        absent = evaluate(config, replace(stored, old_log_probs=None), log_probs)
        assert torch.equal(absent[0], itself[0]) and torch.equal(absent[1], itself[1])
        assert absent[2] == itself[2]
        sampled = mean_ratio(stored, log_probs, stored.generation_log_probs, by_sequence=bool(keys))
        assert float(absent[2]["sampling_importance_ratio"]) == pytest.approx(sampled, abs=1e-6)
        assert abs(sampled - 1) > 1e-3

    @pytest.mark.parametrize("keys", [{}, {"sequence_level_importance_ratios": True, "token_level_loss": False}])
    def test_the_ratio_is_that_to_the_stored_log_probs(self, keys: dict[str, Any]) -> None:
        """Of a policy that has moved on; the engine is still compared with the one before."""
        batch = batch_of(RAGGED)
        log_probs = current_log_probs(batch)
        _, _, metrics = evaluate(loss_config(**keys), batch, log_probs)
        assert batch.old_log_probs is not None
        moved = mean_ratio(batch, log_probs, batch.old_log_probs, by_sequence=bool(keys))
        sampled = mean_ratio(batch, batch.old_log_probs, batch.generation_log_probs, by_sequence=bool(keys))
        assert float(metrics["probs_ratio"]) == pytest.approx(moved, abs=1e-6)
        assert float(metrics["sampling_importance_ratio"]) == pytest.approx(sampled, abs=1e-6)
        assert abs(moved - 1) > 1e-3 and abs(sampled - moved) > 1e-3

    def test_the_gradient_is_that_of_reinforce(self) -> None:
        batch = replace(batch_of(RAGGED), old_log_probs=None)
        log_probs = current_log_probs(batch_of(RAGGED))
        ppo = evaluate(loss_config(), batch, log_probs)[1]
        plain = evaluate(loss_config(disable_ppo_ratio=True), batch, log_probs)[1]
        assert torch.allclose(ppo, plain, atol=1e-7)

    def test_force_ignores_what_is_stored(self) -> None:
        batch = batch_of(RAGGED)
        log_probs = current_log_probs(batch, spread=0.8)
        forced = evaluate(loss_config(force_on_policy_ratio=True), batch, log_probs)
        absent = evaluate(loss_config(), replace(batch, old_log_probs=None), log_probs)
        assert torch.equal(forced[1], absent[1])

    def test_a_clip_anchored_at_the_newest_weights_never_acts(self) -> None:
        """P-16: with stale samples, recomputed old log-probs clip nothing; those of generation do."""
        batch = replace(batch_of([[True] * 50], seed=2), age=torch.tensor([1]))
        log_probs = current_log_probs(batch, spread=0.5)
        newest = evaluate(loss_config(), batch.with_log_probs(old=log_probs.detach()), log_probs)[2]
        anchored = evaluate(loss_config(), batch.with_log_probs(old=batch.generation_log_probs), log_probs)[2]
        assert float(newest["clip_fraction_high"] + newest["clip_fraction_low"]) == 0
        assert float(anchored["clip_fraction_high"] + anchored["clip_fraction_low"]) > 0.2


class TestAgainstTrl:
    """The formulas of TRL's GRPOTrainer on right-padded [B, T] tensors, where the code here has flat ones."""

    def padded(self, values: Tensor, batch: Batch) -> Tensor:
        rows = torch.split(values, batch.lengths.tolist())
        return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True).double()

    def trl(self, batch: Batch, log_probs: Tensor, *, loss_type: str, level: str, beta: float, length: int) -> Tensor:
        assert batch.old_log_probs is not None and batch.reference_log_probs is not None
        lp, old = self.padded(log_probs, batch), self.padded(batch.old_log_probs, batch)
        ref, mask = self.padded(batch.reference_log_probs, batch), self.padded(batch.loss_mask.float(), batch)
        advantages = self.padded(batch.advantages, batch).gather(1, mask.argmax(1, keepdim=True))
        log_ratio = (lp - old) * mask
        if level == "sequence":
            log_ratio = (log_ratio.sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
        coef_1 = torch.exp(log_ratio)
        coef_2 = torch.clamp(coef_1, 1 - 0.2, 1 + 0.28)
        per_token = -torch.min(coef_1 * advantages, coef_2 * advantages)
        per_token = per_token + beta * (torch.exp(ref - lp) - (ref - lp) - 1)
        if loss_type == "grpo":
            return ((per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
        if loss_type == "bnpo":
            return (per_token * mask).sum() / mask.sum().clamp(min=1.0)
        return (per_token * mask).sum() / (per_token.size(0) * length)

    @pytest.mark.parametrize("beta", [0.0, 0.04])
    @pytest.mark.parametrize(
        ("loss_type", "level"),
        [("grpo", "token"), ("bnpo", "token"), ("dr_grpo", "token"), ("grpo", "sequence"), ("dr_grpo", "sequence")],
    )
    def test_loss(self, loss_type: str, level: str, beta: float) -> None:
        batch = batch_of(RAGGED, seed=11)
        log_probs = current_log_probs(batch)
        config = loss_config(
            ratio_clip_max=0.28,
            token_level_loss=loss_type == "bnpo",
            sequence_level_importance_ratios=level == "sequence",
            reference_policy_kl_penalty=beta,
        )
        options = {"reduction": ConstantLength(16)} if loss_type == "dr_grpo" else {}
        loss, gradient, _ = evaluate(config, batch, log_probs, **options)
        leaf = log_probs.detach().requires_grad_()
        expected = self.trl(batch, leaf, loss_type=loss_type, level=level, beta=beta, length=16)
        assert float(loss) == pytest.approx(float(expected.detach()), abs=1e-6)
        if beta == 0:  # TRL leaves the sampling term out of the penalty's gradient
            (expected_gradient,) = torch.autograd.grad(expected, leaf)
            assert torch.allclose(gradient, expected_gradient.float(), atol=1e-6)


class TestMicroBatches:
    @settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=60)
    @given(
        st.sampled_from(sorted(CONFIGS)),
        st.lists(st.lists(st.booleans(), min_size=0, max_size=6), min_size=1, max_size=6),
        st.lists(st.integers(0, 3), min_size=6, max_size=6),
        st.integers(0, 1000),
    )
    def test_any_split_gives_the_same(
        self, name: str, responses: list[list[bool]], parts: list[int], seed: int
    ) -> None:
        """L-03, L-04, L-20, K-13: loss, gradient and metrics add up over micro-batches, also over empty ones."""
        config, batch = loss_config(**CONFIGS[name]), batch_of(responses, seed=seed)
        log_probs = current_log_probs(batch)
        whole_loss, whole_gradient, whole_metrics = evaluate(config, batch, log_probs)
        objective, normalizer = build_objective(config), batch.normalizer()
        leaf = log_probs.detach().clone().requires_grad_()
        total: dict[str, float] = dict.fromkeys(whole_metrics, 0.0)
        loss_sum = 0.0
        for part in range(4):
            chosen = torch.tensor([i for i in range(len(responses)) if parts[i] == part], dtype=torch.int64)
            micro = batch.select(chosen)
            loss, metrics = objective(leaf[batch.token_positions(chosen)], micro, normalizer)
            loss.backward()
            loss_sum += float(loss.detach())
            total = {key: total[key] + float(value) for key, value in metrics.items()}
        assert loss_sum == pytest.approx(float(whole_loss), abs=1e-6)
        assert leaf.grad is not None
        assert torch.allclose(leaf.grad, whole_gradient, atol=1e-6)
        assert total == pytest.approx({key: float(value) for key, value in whole_metrics.items()}, abs=1e-5)

    def test_two_and_five_tokens_equal_seven(self) -> None:
        """L-03: a mean of means would weight the two tokens 2.5 times too much."""
        batch = batch_of([[True] * 2, [True] * 5], advantages=[1.0, -1.0])
        log_probs = current_log_probs(batch)
        whole = evaluate(loss_config(), batch, log_probs)[1]
        objective = build_objective(loss_config())
        leaf = log_probs.detach().clone().requires_grad_()
        for index in range(2):
            chosen = torch.tensor([index])
            part = leaf[batch.token_positions(chosen)]
            objective(part, batch.select(chosen), batch.normalizer())[0].backward()
        assert leaf.grad is not None
        assert torch.allclose(leaf.grad, whole, atol=1e-7)

    @pytest.mark.parametrize("name", CONFIGS)
    def test_without_a_trained_token_the_loss_is_zero(self, name: str) -> None:
        """L-02, K-13: 0 with a gradient of zeros, whatever stands at the untrained positions."""
        batch = batch_of([[False, False], [False]])
        log_probs = torch.full((len(batch.tokens),), float("nan"), requires_grad=True)
        loss, gradient, metrics = evaluate(loss_config(**CONFIGS[name]), batch, log_probs)
        assert float(loss) == 0
        assert torch.equal(gradient, torch.zeros_like(gradient))
        assert all(float(value) == 0 for value in metrics.values())

    def test_an_empty_micro_batch_still_has_a_gradient(self) -> None:
        """K-13: a rank whose bin is empty calls backward like the others."""
        batch = batch_of(RAGGED)
        empty = batch.select(torch.zeros(0, dtype=torch.int64))
        leaf = torch.zeros(3, requires_grad=True)
        loss, _ = build_objective(loss_config())(leaf[:0], empty, batch.normalizer())
        loss.backward()
        assert leaf.grad is not None and not leaf.grad.any()

    def test_untrained_positions_reach_nothing(self) -> None:
        """P-21, T-08, T-09: nan and inf at prompt and tool tokens change neither loss nor gradient, nor the inputs."""
        config = loss_config(
            **CONFIGS["icepop"] | {"reference_policy_kl_penalty": 0.1, "use_on_policy_kl_approximation": True}
        )
        clean, dirty = batch_of(RAGGED, seed=5), batch_of(RAGGED, seed=5)
        log_probs = current_log_probs(clean).detach()
        assert dirty.old_log_probs is not None and dirty.reference_log_probs is not None
        poisoned = torch.where(clean.loss_mask, log_probs, float("nan"))
        for field in (dirty.old_log_probs, dirty.reference_log_probs, dirty.generation_log_probs, dirty.advantages):
            field[~dirty.loss_mask] = float("inf")
        before = dirty.reference_log_probs.clone()
        expected, got = evaluate(config, clean, log_probs), evaluate(config, dirty, poisoned)
        assert torch.equal(expected[0], got[0])
        assert torch.equal(expected[1], got[1])
        assert torch.equal(dirty.reference_log_probs, before)
        assert not got[1][~clean.loss_mask].any()


class TestAlignment:
    def test_the_first_response_token_has_a_gradient_and_the_last_prompt_token_none(self) -> None:
        """T-08: prompt of 3, response of 2."""
        batch = batch_of([[True, True]], prompts=3, advantages=[1.0])
        _, gradient, _ = evaluate(loss_config(), batch, current_log_probs(batch, spread=0.01))
        assert (gradient != 0).tolist() == [False, False, False, True, True]


class TestKlFlows:
    def test_through_groups_without_advantage(self) -> None:
        """L-11: equal rewards with beta > 0 still pull towards the reference."""
        batch = batch_of(RAGGED, advantages=[0.0] * 4)
        _, gradient, metrics = evaluate(loss_config(reference_policy_kl_penalty=0.04), batch, current_log_probs(batch))
        assert (gradient[batch.loss_mask] != 0).all()
        assert float(metrics["policy_loss"]) == 0

    def test_its_metric_leaves_the_factor_out(self) -> None:
        batch = batch_of(RAGGED)
        log_probs = current_log_probs(batch)
        small = evaluate(loss_config(reference_policy_kl_penalty=0.01), batch, log_probs)[2]["kl_penalty"]
        large = evaluate(loss_config(reference_policy_kl_penalty=1.0), batch, log_probs)[2]["kl_penalty"]
        assert float(small) == pytest.approx(float(large))

    def test_without_reference_log_probs_it_is_refused(self) -> None:
        batch = replace(batch_of(RAGGED), reference_log_probs=None)
        with pytest.raises(ValueError, match="reference_policy_kl_penalty"):
            evaluate(loss_config(reference_policy_kl_penalty=0.1), batch, current_log_probs(batch))


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"use_cispo": True, "ratio_clip_c": 3.0}, "ratio_clip_c"),
        ({"use_cispo": True, "disable_ppo_ratio": True}, "disable_ppo_ratio"),
        ({"sequence_level_importance_ratios": True}, "token_level_loss"),
        ({"ratio_clip_c": 1.0}, "ratio_clip_c must be above 1"),
        ({"truncated_importance_sampling_type": "tis"}, "use_importance_sampling_correction"),
        (
            {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": "icepop"},
            "truncated_importance_sampling_ratio must be set",
        ),
    ],
)
def test_combinations_without_a_meaning_are_refused(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        build_objective(loss_config(**keys))
