"""`grpo`: how many samples a step takes, how long the run is, and what happens to rewards before advantages."""

from __future__ import annotations

from pydantic import Field

from trireme.config.base import Block, ref


class RewardShapingConfig(Block):
    """The overlong penalty of DAPO: 0 up to the limit less the buffer, then linear down to minus the penalty."""

    enabled: bool = Field(False, description="Subtract a penalty from the reward of responses near the length limit.")
    overlong_buffer_length: int = Field(
        128, ge=1, description="Length of the ramp before the limit over which the penalty grows, in tokens."
    )
    overlong_buffer_penalty: float = Field(
        1.0, ge=0, description="Largest amount that is subtracted, in units of reward."
    )
    max_response_length: int = Field(
        ref("policy.max_total_sequence_length"),
        ge=1,
        description="Response length at which the penalty is complete, in tokens.",
    )


class RewardScalingConfig(Block):
    """A linear map of rewards from one interval to another; rewards outside the source interval are clamped to it."""

    enabled: bool = Field(False, description="Map rewards from the source interval to the target interval.")
    source_min: float = Field(0.0, description="Reward that becomes `target_min`, in units of reward.")
    source_max: float = Field(1.0, description="Reward that becomes `target_max`, in units of reward.")
    target_min: float = Field(0.0, description="Lower end of the rewards after scaling, in units of reward.")
    target_max: float = Field(1.0, description="Upper end of the rewards after scaling, in units of reward.")


class AsyncGrpoConfig(Block):
    """Generation that runs ahead of training by a bounded number of weight versions."""

    enabled: bool = Field(False, description="Let generation run ahead of training; off is strictly on-policy.")
    max_trajectory_age_steps: int = Field(
        1, ge=1, description="Largest age of a trained token, in weight versions, when asynchronous."
    )
    in_flight_weight_updates: bool = Field(
        False,
        description="Swap weights under running requests, whose tokens then carry several versions, "
        "in place of waiting for the requests to finish.",
    )


class GrpoConfig(Block):
    """Group-relative policy optimisation: the steps, the groups and the validation."""

    num_prompts_per_step: int = Field(32, ge=1, description="Prompts, each with one group of samples, in a step.")
    num_generations_per_prompt: int = Field(16, ge=1, description="Samples generated for each prompt (the group size).")
    max_rollout_turns: int = Field(1, ge=1, description="Largest number of model turns in an episode.")
    max_num_steps: int = Field(1_000_000, ge=1, description="Optimisation steps after which the run ends.")
    max_num_epochs: int = Field(1, ge=1, description="Passes over the training prompts after which the run ends.")
    normalize_rewards: bool = Field(
        True, description="Divide advantages by the standard deviation of the group; off is Dr. GRPO."
    )
    use_leave_one_out_baseline: bool = Field(
        True, description="Take baseline and deviation of a sample over the other samples of its group."
    )
    val_period: int = Field(10, ge=0, description="Steps between validations; 0 never validates during training.")
    val_at_start: bool = Field(False, description="Validate once before the first step.")
    max_val_samples: int = Field(256, ge=1, description="Largest number of held-out prompts in a validation.")
    val_batch_size: int = Field(256, ge=1, description="Validation prompts in flight at the same time.")
    seed: int = Field(42, ge=0, description="Seed of data order, sampling and initialisation.")
    overlong_filtering: bool = Field(
        False, description="Leave samples that hit the length limit out of the loss (they stay in the baseline)."
    )
    use_dynamic_sampling: bool = Field(
        False, description="Replace groups whose raw rewards are all equal by further groups until the step is full."
    )
    dynamic_sampling_max_gen_batches: int = Field(
        10, ge=1, description="Largest number of generation batches for one step under dynamic sampling."
    )
    batch_multiplier: int = Field(
        1, ge=1, description="Prompts generated ahead under dynamic sampling, as a multiple of num_prompts_per_step."
    )
    reward_shaping: RewardShapingConfig = Field(
        default_factory=RewardShapingConfig, description="Penalty on overlong responses."
    )
    reward_scaling: RewardScalingConfig = Field(
        default_factory=RewardScalingConfig, description="Linear scaling of rewards."
    )
    async_grpo: AsyncGrpoConfig = Field(
        default_factory=AsyncGrpoConfig, description="Generation ahead of training, and how far."
    )

    @property
    def samples_per_step(self) -> int:
        """Samples that a step consumes."""
        return self.num_prompts_per_step * self.num_generations_per_prompt
