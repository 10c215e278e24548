"""What `metrics.jsonl` holds."""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """A key of `metrics.jsonl`: the unit of its values and what they mean."""

    unit: str
    meaning: str


METRICS = {
    "global_step": Metric("updates", "Optimizer steps so far, this one included."),
    "loss": Metric(
        "1",
        "What is minimised: `policy_loss` + `kl_loss_coef` x `policy_kl` - `entropy_loss_coef` x"
        " entropy, reduced by `loss_reduction`.",
    ),
    "policy_loss": Metric(
        "1", "The policy loss, importance weights included, reduced by `loss_reduction`."
    ),
    "policy_kl": Metric(
        "nats",
        "Estimate of the KL divergence from the reference, reduced by `loss_reduction`; absent"
        " where `kl_loss_coef` is 0.",
    ),
    "policy_entropy": Metric(
        "nats", "Mean entropy of the policy at the trained tokens, at each row's temperature."
    ),
    "grad_norm": Metric("1", "L2 norm of the gradient before clipping; null if not finite."),
    "clip_ratio": Metric(
        "fraction",
        "Trained tokens that the bounds of the policy loss hold back: without gradient, or, with"
        " cispo, with a clipped weight.",
    ),
    "cispo/ratio_mean": Metric(
        "1", "Mean of exp(l - anchor) over the trained tokens; these four with cispo only."
    ),
    "cispo/ratio_clamped_mean": Metric("1", "Mean of the weights that its bounds make of it."),
    "cispo/ratio_max": Metric("1", "The greatest of these ratios."),
    "cispo/ratio_min": Metric("1", "The least of them."),
    "importance_ratio": Metric(
        "1", "Mean of exp(l - `old_logprobs`) over the trained tokens; importance_sampling only."
    ),
    "num_trained_tokens": Metric("tokens", "Response tokens in the loss."),
    "num_forwarded_tokens": Metric(
        "tokens", "Tokens forwarded with gradient; the pass for the old log-probabilities not."
    ),
    "repeated_share": Metric(
        "fraction",
        "Tokens forwarded over distinct ones, less 1: what cutting trees into micro-batches costs;"
        " with `sequence_layout` tree only.",
    ),
    "num_micro_batches": Metric(
        "forwards", "Forwards the mini-batch was cut into, over all processes."
    ),
    "skipped": Metric("0 or 1", "1: no step, for no token trains or the gradient is not finite."),
    "is_ratio_mean": Metric(
        "1",
        "Mean over the trained tokens of exp(`old_logprobs` - `rollout_logprobs`), before caps and"
        " masks. It and what follows is absent where that correction is off.",
    ),
    "is_ratio_std": Metric("1", "Sample standard deviation of these ratios."),
    "is_ratio_max": Metric("1", "The greatest of them."),
    "is_ratio_min": Metric("1", "The least of them."),
    "tis_token_clip_high_ratio": Metric(
        "fraction", "Trained tokens, of those not left out before, whose weight is the cap."
    ),
    "tis_seq_clip_high_ratio": Metric(
        "fraction",
        "Rows whose weight is the cap; rows are those with a trained token, here and below.",
    ),
    "outlier_seq_masked_ratio": Metric("fraction", "Rows left out for an outlier token."),
    "outlier_seq_over_high_ratio": Metric("fraction", "Rows with a token above the threshold."),
    "outlier_seq_under_low_ratio": Metric("fraction", "Rows with a token below the threshold."),
    "token_mask_ratio": Metric(
        "fraction", "Trained tokens left out one by one, of those not left out with a row."
    ),
    "geo_sequence_mask_masked_ratio": Metric("fraction", "Rows left out by the geometric mean."),
    "geo_sequence_mask_over_high_ratio": Metric("fraction", "Those above `geo_mask_high`."),
    "geo_sequence_mask_under_low_ratio": Metric("fraction", "Those below `geo_mask_low`."),
    "product_sequence_mask_masked_ratio": Metric("fraction", "Rows left out by the product."),
    "product_sequence_mask_over_high_ratio": Metric("fraction", "Those above `product_mask_high`."),
    "product_sequence_mask_under_low_ratio": Metric("fraction", "Those below `product_mask_low`."),
    "rollout_logprobs_abs_diff_mean": Metric(
        "nats",
        "Mean absolute difference between `old_logprobs` (of the policy now, where the loss needs"
        " none) and `rollout_logprobs`; absent unless every trained token has one.",
    ),
    "rollout_logprobs_abs_diff_std": Metric("nats", "Sample standard deviation of them."),
    "rollout_logprobs_abs_diff_max": Metric("nats", "The largest such difference."),
    "rollout_logprobs_abs_diff_min": Metric("nats", "The smallest."),
    "rollout_logprobs_abs_diff_p50": Metric("nats", "Their median."),
    "rollout_logprobs_abs_diff_p90": Metric("nats", "What nine of ten are at most."),
    "rollout_logprobs_abs_diff_p99": Metric("nats", "What 99 of a hundred are at most."),
    "rollout_logprobs_diff_mean": Metric(
        "nats", "Mean of `old_logprobs` - `rollout_logprobs`: what is left of noise is near 0."
    ),
    "is_effective_share": Metric(
        "fraction",
        "Effective sample size of the ratios exp(`old_logprobs` - `rollout_logprobs`) over the"
        " number of trained tokens: 1 where all are equal.",
    ),
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
    "loss/avg_kl": Metric(
        "nats",
        "Mean estimate of the batch's KL divergence from the reference, per trained token; it and"
        " these two with `kl_reward_coef` only.",
    ),
    "loss/avg_kl_max": Metric("nats", "The greatest of these estimates."),
    "loss/kl_reward_coef": Metric("1", "What they were multiplied by before they were taken off."),
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
    "learning_rate": Metric("1", "The policy's learning rate in this update."),
    "seconds": Metric(
        "s", "Time the update took; a batch's first one loads it and has the old-logprobs pass."
    ),
    "tokens_per_s": Metric("tokens/s", "`num_forwarded_tokens` over `seconds`."),
}

LOOP_METRICS = {
    "iteration": Metric(
        "iterations", "Of the update, from 0; of an evaluation: iterations trained before it."
    ),
    "staleness_mean": Metric(
        "iterations",
        "Mean over the iteration's rows of `iteration` - `policy_version`; it and what follows is"
        " on the first line of an iteration.",
    ),
    "staleness_max": Metric("iterations", "The greatest."),
    "staleness_histogram": Metric("rows", 'Rows by staleness: an object, `{"0": 28, "1": 4}`.'),
    "response_tokens_mean": Metric("tokens", "Mean over trajectories of the tokens sampled."),
    "steps_mean": Metric("rows", "Mean over trajectories of their calls."),
    "num_dropped_groups": Metric(
        "groups",
        "Groups without variance that were sampled since the iteration before and do not count;"
        " with `drop_zero_variance_groups`.",
    ),
    "wait_seconds": Metric("s", "Time the trainer waited for the iteration's groups."),
    "sync_seconds": Metric(
        "s", "Time to write the weights that the iteration began with, and to load them."
    ),
    "evaluation/return_mean": Metric(
        "reward",
        "Mean return of an evaluation's trajectories that did not fail; it and what follows is on"
        " lines of their own.",
    ),
    "evaluation/num_trajectories": Metric("trajectories", "All of them."),
    "evaluation/num_failed": Metric("trajectories", "Those that failed."),
}
"""What `rollouts rl` adds."""
