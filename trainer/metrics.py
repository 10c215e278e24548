"""What `metrics.jsonl` holds, and what in it deserves a warning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from trainer.config import TrainConfig

LARGE_DIFFERENCE_NATS = 0.3


class Metric(NamedTuple):
    """A key of `metrics.jsonl`: the unit of its values and what they mean."""

    unit: str
    meaning: str


METRICS = {
    "global_step": Metric("updates", "Optimizer steps so far, this one included."),
    "loss": Metric(
        "1", "The policy loss, importance weights included: its mean over the trained tokens."
    ),
    "policy_entropy": Metric(
        "nats", "Mean entropy of the policy at the trained tokens, at each row's temperature."
    ),
    "grad_norm": Metric("1", "L2 norm of the gradient before clipping; null if not finite."),
    "clip_fraction": Metric(
        "fraction", "Trained tokens whose probability ratio is clipped, without gradient."
    ),
    "num_trained_tokens": Metric("tokens", "Response tokens in the loss."),
    "num_forwarded_tokens": Metric(
        "tokens", "Tokens forwarded with gradient; the pass for the old log-probabilities not."
    ),
    "num_micro_batches": Metric("forwards", "Forwards the mini-batch was cut into."),
    "skipped": Metric("0 or 1", "1: no step, for no token trains or the gradient is not finite."),
    "tis_mean": Metric(
        "1", "Mean importance weight after the cap; absent where the correction is off."
    ),
    "tis_capped_fraction": Metric(
        "fraction", "Trained tokens whose weight is the cap; absent where the correction is off."
    ),
    "rollout_logprobs_abs_diff_mean": Metric(
        "nats",
        "Mean absolute difference between `old_logprobs` and `rollout_logprobs`; absent unless"
        " every trained token has one.",
    ),
    "rollout_logprobs_abs_diff_max": Metric("nats", "The largest such difference."),
    "num_groups": Metric("groups", "Groups in the mini-batch."),
    "num_trained_groups": Metric(
        "groups", "Those with a trained token whose advantage is not 0: they make the gradient."
    ),
    "num_trajectories": Metric("trajectories", "Trajectories in the mini-batch."),
    "num_failed": Metric("trajectories", "Those that failed."),
    "num_masked": Metric("trajectories", "Those that failed or are masked with their group."),
    "return_mean": Metric(
        "reward", "Mean return of the trajectories that did not fail; null if all did."
    ),
    "reward/avg_raw_reward": Metric("reward", "The same by its other name."),
    "reward/mean_positive_reward": Metric("reward", "Mean of those returns, negative ones as 0."),
    "reward/avg_pass_at_n": Metric(
        "fraction", "Groups with a return above 0, of those not all of whose trajectories failed."
    ),
    "loss/avg_final_rewards": Metric("reward", "Mean return of the trajectories that train."),
    "loss/avg_raw_advantages": Metric(
        "1", "Mean advantage of the trained tokens, before `advantage_batch_normalize`."
    ),
    "loss/avg_raw_advantages_abs": Metric("1", "Mean of their absolute values."),
    "critic/critic_loss": Metric(
        "1", "The clipped value loss: its mean over the trained tokens; these four with gae only."
    ),
    "critic/values_mean": Metric("reward", "Mean value of the trained tokens."),
    "critic/values_clipfrac": Metric(
        "fraction", "Trained tokens whose clipped value makes the loss, without gradient."
    ),
    "critic/grad_norm": Metric(
        "1", "L2 norm of the critic's gradient before clipping; null if not finite: no step."
    ),
    "num_rows": Metric("rows", "Rows of the mini-batch, in `sequence_layout`."),
    "learning_rate": Metric("1", "AdamW's learning rate."),
    "seconds": Metric(
        "s", "Time the update took; a batch's first one loads it and has the old-logprobs pass."
    ),
    "tokens_per_s": Metric("tokens/s", "`num_forwarded_tokens` over `seconds`."),
}


def warnings_about(metrics: Mapping[str, Any], config: TrainConfig) -> dict[str, str]:
    """What a person should know about an update.

    Args:
        metrics: The update's metrics.
        config: The run's configuration.

    Returns:
        Text for people by the name of its subject; a run says each name once.

    Example:
        >>> update = {"num_trained_tokens": 9, "num_trained_groups": 0}
        >>> list(warnings_about(update, TrainConfig(dataset="ds", model="m", out="o")))
        ['zero_gradient']
    """
    found = {}
    difference = metrics.get("rollout_logprobs_abs_diff_mean", 0.0)
    if difference > LARGE_DIFFERENCE_NATS:
        found["rollout_logprobs"] = (
            f"rollout_logprobs differ from the policy's own by {difference:.2g} nats on average;"
            " likely causes: other weights than the sampler's, another tokenizer,"
            " log-probabilities at another temperature, rollout_logprobs off by one"
        )
    if metrics["num_trained_tokens"] and not metrics["num_trained_groups"]:
        leave_out = "\nhint: --set drop_zero_variance_groups=true leaves such groups out"
        found["zero_gradient"] = (
            "every advantage of a mini-batch is 0 (no group whose rewards vary),"
            " so its update has a gradient of zero"
            + ("" if config.drop_zero_variance_groups else leave_out)
        )
    return found
