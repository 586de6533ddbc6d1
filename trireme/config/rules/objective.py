"""Rules about the loss: ratios, clipping, corrections, and what anchors the ratio when samples are stale."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trireme.config.rules.registry import Rule, rule_into

if TYPE_CHECKING:
    from trireme.config.root import Config

RULES: list[Rule] = []
rule = rule_into(RULES)
CORRECTION = "loss_fn.use_importance_sampling_correction"
TYPE = "loss_fn.truncated_importance_sampling_type"
UPPER = "loss_fn.truncated_importance_sampling_ratio"
LOWER = "loss_fn.truncated_importance_sampling_ratio_min"
# The bounds that objectives of this kind are published with: what to offer to someone who left them out.
USUAL_UPPER = {"tis": 2.0, "icepop": 5.0, "seq-mask-tis": 1.002}
USUAL_LOWER = {"icepop": 0.5, "seq-mask-tis": 0.999}


@rule("force-on-policy-ratio")
def _force_on_policy(config: Config) -> Iterator[str]:
    """A ratio fixed to 1 needs one optimiser step for all samples of a step."""
    samples, batch = config.grpo.samples_per_step, config.policy.train_global_batch_size
    if config.loss_fn.force_on_policy_ratio and samples != batch:
        yield (
            "loss_fn.force_on_policy_ratio needs grpo.num_prompts_per_step x grpo.num_generations_per_prompt "
            f"({samples}) to equal policy.train_global_batch_size ({batch}): policy.train_global_batch_size={samples}"
        )


@rule("sequence-level-ratio-reduction")
def _sequence_level(config: Config) -> Iterator[str]:
    """Sequence-level ratios need a loss averaged over sequences."""
    if config.loss_fn.sequence_level_importance_ratios and config.loss_fn.token_level_loss:
        yield (
            "loss_fn.sequence_level_importance_ratios needs loss_fn.token_level_loss to be false, not true: "
            "loss_fn.token_level_loss=false"
        )


@rule("truncated-importance-sampling")
def _truncation(config: Config) -> Iterator[str]:
    """A truncation type needs the correction on and its bounds set, in order; bounds need a type."""
    loss = config.loss_fn
    kind = loss.truncated_importance_sampling_type
    if kind is None:
        yield from _bounds_without_type(config)
        return
    if not loss.use_importance_sampling_correction:
        yield f"{TYPE} is {kind} but {CORRECTION} is false, so nothing is truncated: {CORRECTION}=true, or {TYPE}=null"
    if loss.truncated_importance_sampling_ratio is None:
        yield f"{TYPE} is {kind} but its bound {UPPER} is null: {UPPER}={USUAL_UPPER[kind]}"
    if kind in USUAL_LOWER and loss.truncated_importance_sampling_ratio_min is None:
        yield f"{TYPE} is {kind} but its bound {LOWER} is null: {LOWER}={USUAL_LOWER[kind]}"
    yield from _bounds_in_order(config)


def _bounds_without_type(config: Config) -> Iterator[str]:
    for key in (UPPER, LOWER):
        value = getattr(config.loss_fn, key.removeprefix("loss_fn."))
        if value is not None:
            yield f"{key} is {value} but {TYPE} is null, so nothing is truncated: {TYPE}=tis, or {key}=null"


def _bounds_in_order(config: Config) -> Iterator[str]:
    upper = config.loss_fn.truncated_importance_sampling_ratio
    lower = config.loss_fn.truncated_importance_sampling_ratio_min
    if upper is not None and lower is not None and lower > upper:
        yield f"{LOWER} ({lower}) is above {UPPER} ({upper}): exchange them"


@rule("cispo-excludes")
def _cispo(config: Config) -> Iterator[str]:
    """CISPO excludes dual clip, disable_ppo_ratio and sequence-level ratios."""
    loss = config.loss_fn
    if not loss.use_cispo:
        return
    if loss.ratio_clip_c is not None:
        yield f"loss_fn.use_cispo excludes dual clip, loss_fn.ratio_clip_c={loss.ratio_clip_c}: ratio_clip_c=null"
    if loss.disable_ppo_ratio:
        yield "loss_fn.use_cispo excludes loss_fn.disable_ppo_ratio=true: disable_ppo_ratio=false"
    if loss.sequence_level_importance_ratios:
        yield (
            "loss_fn.use_cispo excludes loss_fn.sequence_level_importance_ratios=true: "
            "sequence_level_importance_ratios=false"
        )


@rule("dual-clip-bound")
def _dual_clip(config: Config) -> Iterator[str]:
    """The dual-clip bound is above 1."""
    bound = config.loss_fn.ratio_clip_c
    if bound is not None and bound <= 1:
        yield f"loss_fn.ratio_clip_c is {bound}, but a dual-clip bound is above 1: 3.0, or null for none"


@rule("async-anchor")
def _async_anchor(config: Config) -> Iterator[str]:
    """Stale samples need the importance-sampling correction."""
    if config.grpo.async_grpo.enabled and not config.loss_fn.use_importance_sampling_correction:
        yield (
            f"grpo.async_grpo.enabled trains on stale samples, but {CORRECTION} is false, so that nothing ties the "
            f"ratio to the policy that sampled them and clipping acts on nothing: {CORRECTION}=true"
        )


@rule("async-separate-rollout")
def _async_separate(config: Config) -> Iterator[str]:
    """Asynchronous training needs rollout servers with accelerators of their own."""
    if config.grpo.async_grpo.enabled and config.policy.generation.colocated.enabled:
        yield (
            "grpo.async_grpo.enabled needs rollout servers of their own, but policy.generation.colocated.enabled is "
            "true: policy.generation.colocated.enabled=false"
        )


@rule("global-batch-divides-step")
def _global_batch(config: Config) -> Iterator[str]:
    """train_global_batch_size divides the samples of a step."""
    samples, batch = config.grpo.samples_per_step, config.policy.train_global_batch_size
    if samples % batch:
        yield (
            f"policy.train_global_batch_size ({batch}) does not divide grpo.num_prompts_per_step x "
            f"grpo.num_generations_per_prompt ({samples}): "
            f"policy.train_global_batch_size={samples}, which is one optimizer step a batch, or another divisor"
        )


@rule("stop-strings-not-empty")
def _stop_strings(config: Config) -> Iterator[str]:
    """No stop string is empty: it would end every response before its first token."""
    if "" in (config.policy.generation.stop_strings or []):
        yield "policy.generation.stop_strings holds an empty text: leave it out"


@rule("sampling-filter")
def _sampling_filter(config: Config) -> Iterator[str]:
    """Samples are not filtered by top-p or top-k: the trainer's log-probs would not be those of the samples."""
    generation = config.policy.generation
    why = "shapes the samples in a way that the trainer's log-probs do not follow"
    if generation.top_p < 1:
        yield f"policy.generation.top_p={generation.top_p} {why}: policy.generation.top_p=1.0"
    if generation.top_k is not None:
        yield f"policy.generation.top_k={generation.top_k} {why}: policy.generation.top_k=null"


@rule("staleness-bound")
def _staleness(config: Config) -> Iterator[str]:
    """The bound on age is the one that async_grpo gives."""
    schedule = config.grpo.async_grpo
    allowed = schedule.max_trajectory_age_steps if schedule.enabled else 0
    if config.staleness.max_versions != allowed:
        yield (
            f"staleness.max_versions is {config.staleness.max_versions}, but grpo.async_grpo.enabled="
            f"{str(schedule.enabled).lower()} with max_trajectory_age_steps={schedule.max_trajectory_age_steps} gives "
            f"{allowed}: leave staleness.max_versions out, or null"
        )
