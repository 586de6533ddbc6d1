"""`loss_fn`: the policy loss, its clipping, its reference KL and its correction for engine and staleness mismatch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trireme.config.base import Block


class LossConfig(Block):
    """The clipped policy loss and its variants; ratios are current policy over the policy before the step."""

    reference_policy_kl_penalty: float = Field(
        0.01, ge=0, description="Weight of the KL to the frozen starting model; 0 keeps no reference model."
    )
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = Field("k3", description="Estimator of the reference KL.")
    ratio_clip_min: float = Field(0.2, ge=0, lt=1, description="The ratio is clipped below at 1 minus this.")
    ratio_clip_max: float = Field(0.2, ge=0, description="The ratio is clipped above at 1 plus this.")
    ratio_clip_c: float | None = Field(
        None, description="Dual-clip bound on the ratio of samples with negative advantage, above 1; null is off."
    )
    use_on_policy_kl_approximation: bool = Field(
        False, description="Weight the reference KL by the ratio of the current to the generation policy."
    )
    use_importance_sampling_correction: bool = Field(
        False, description="Weight each token's loss by trainer over engine probability, without gradient."
    )
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = Field(
        None,
        description="Bound on the correction weight: `tis` clamps it, `icepop` zeroes tokens outside the bounds, "
        "`seq-mask-tis` masks sequences outside them; null leaves it unbounded.",
    )
    truncated_importance_sampling_ratio: float | None = Field(
        None, gt=0, description="Upper bound of the correction weight, as a probability ratio."
    )
    truncated_importance_sampling_ratio_min: float | None = Field(
        None, ge=0, description="Lower bound of the correction weight, as a probability ratio."
    )
    sequence_level_importance_ratios: bool = Field(
        False, description="One ratio for a sequence, from its mean log-ratio (GSPO), in place of one for each token."
    )
    token_level_loss: bool = Field(
        True, description="Average the loss over tokens of the global batch; off averages over sequences."
    )
    disable_ppo_ratio: bool = Field(False, description="Use the log-probability in place of the ratio (REINFORCE).")
    force_on_policy_ratio: bool = Field(
        False, description="Fix the ratio to exactly 1 (its gradient stays); needs one optimiser step for a batch."
    )
    use_cispo: bool = Field(
        False, description="Weight the log-probability by the clipped ratio without gradient (CISPO)."
    )
