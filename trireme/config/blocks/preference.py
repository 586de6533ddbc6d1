"""`dpo` and `sft`: the offline algorithms."""

from __future__ import annotations

from pydantic import Field

from trireme.config.base import Block


class DpoConfig(Block):
    """Direct preference optimisation."""

    max_num_epochs: int = Field(1, ge=1, description="Passes over the pairs after which the run ends.")
    max_num_steps: int = Field(1_000_000, ge=1, description="Optimisation steps after which the run ends.")
    val_period: int = Field(10, ge=0, description="Steps between validations; 0 never validates.")
    reference_policy_kl_penalty: float = Field(0.05, ge=0, description="Weight of the implicit KL (beta).")
    preference_loss_weight: float = Field(1.0, ge=0, description="Weight of the preference loss.")
    sft_loss_weight: float = Field(0.0, ge=0, description="Weight of the likelihood of chosen answers.")
    preference_average_log_probs: bool = Field(False, description="Average log-probs over tokens in the preference.")
    sft_average_log_probs: bool = Field(False, description="Average log-probs over tokens in the likelihood term.")


class SftConfig(Block):
    """Supervised fine-tuning."""

    max_num_epochs: int = Field(1, ge=1, description="Passes over the examples after which the run ends.")
    max_num_steps: int = Field(1_000_000, ge=1, description="Optimisation steps after which the run ends.")
    val_period: int = Field(10, ge=0, description="Steps between validations; 0 never validates.")
