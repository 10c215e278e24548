"""Keys of `metrics.jsonl`."""

from __future__ import annotations

from typing import NamedTuple

from schemas.tables import table_rows


class Metric(NamedTuple):
    """Unit and meaning of a key of `metrics.jsonl`."""

    unit: str
    meaning: str


GENERATED = ("generate/", "environment/")
"""Prefixes of metrics that `rollouts stats` also reports. Metrics that exist both per step and per
trajectory are given per step."""
OWN_LOSS = "policy_loss/"
"""Prefix of the metrics that a user's policy loss returns."""


def _metrics(table: str) -> dict[str, Metric]:
    return {key: Metric(unit, meaning) for key, unit, meaning in table_rows(table)}


METRICS = _metrics("""
global_step | updates | Optimizer steps so far, including this one.
loss | 1 | Minimised loss: `policy_loss` + `kl_loss_coef` x `policy_kl` - `entropy_loss_coef` x entropy, reduced by
    `loss.reduction`.
policy_loss | 1 | Policy loss with importance weights, reduced by `loss.reduction`.
policy_kl | nats | Estimate of the KL divergence from the reference, reduced by `loss.reduction`; absent if
    `kl_loss_coef` is 0.
policy_entropy | nats | Mean entropy of the policy at the trained tokens, at each row's temperature.
grad_norm | 1 | L2 norm of the gradient before clipping; null if not finite.
clip_ratio | fraction | Trained tokens clipped by the bounds of the policy loss. They have no gradient; with cispo,
    their weight is clipped instead. A custom loss can return this metric, and others named `policy_loss/...`.
cispo/ratio_mean | 1 | Mean of exp(l - anchor) over the trained tokens; the `cispo/` metrics exist only with cispo.
cispo/ratio_clamped_mean | 1 | Mean of the clipped ratios, which are the weights.
cispo/ratio_max | 1 | Largest ratio.
cispo/ratio_min | 1 | Smallest ratio.
importance_ratio | 1 | Mean of exp(l - `old_logprobs`) over the trained tokens; importance_sampling only.
num_trained_tokens | tokens | Response tokens in the loss.
num_forwarded_tokens | tokens | Tokens forwarded with gradient, excluding the pass for the old log-probabilities.
repeated_share | fraction | Forwarded tokens divided by distinct tokens, minus 1. It measures the cost of cutting
    trees into micro-batches; only with `sequence_layout` tree.
num_micro_batches | forwards | Micro-batches of the mini-batch, over all processes.
skipped | 0 or 1 | 1 if no step was taken, because there were no trained tokens or the gradient was not finite.
is_ratio_mean | 1 | Mean over the trained tokens of exp(`old_logprobs` - `rollout_logprobs`), before caps and masks.
    This and the following ratio metrics are absent without the correction.
is_ratio_std | 1 | Sample standard deviation of these ratios.
is_ratio_max | 1 | Largest of these ratios.
is_ratio_min | 1 | Smallest of these ratios.
tis_token_clip_high_ratio | fraction | Tokens whose weight is capped, as a fraction of the trained tokens that the
    masks kept.
tis_seq_clip_high_ratio | fraction | Rows whose weight is capped; here and below, as a fraction of rows with a trained
    token.
outlier_seq_masked_ratio | fraction | Rows left out because of an outlier token.
outlier_seq_over_high_ratio | fraction | Rows with a token above the threshold.
outlier_seq_under_low_ratio | fraction | Rows with a token below the threshold.
token_mask_ratio | fraction | Trained tokens left out individually, as a fraction of the trained tokens in kept rows.
geo_sequence_mask_masked_ratio | fraction | Rows left out because the geometric mean of their ratios is out of bounds.
geo_sequence_mask_over_high_ratio | fraction | Rows above `geo_mask_high`.
geo_sequence_mask_under_low_ratio | fraction | Rows below `geo_mask_low`.
product_sequence_mask_masked_ratio | fraction | Rows left out because the product of their ratios is out of bounds.
product_sequence_mask_over_high_ratio | fraction | Rows above `product_mask_high`.
product_sequence_mask_under_low_ratio | fraction | Rows below `product_mask_low`.
rollout_logprobs_abs_diff_mean | nats | Mean absolute difference between `old_logprobs` (or the current policy's
    log-probabilities, if the loss does not need `old_logprobs`) and `rollout_logprobs`; absent unless every trained
    token has a `rollout_logprobs` value.
rollout_logprobs_abs_diff_std | nats | Sample standard deviation of these differences.
rollout_logprobs_abs_diff_max | nats | Largest of these differences.
rollout_logprobs_abs_diff_min | nats | Smallest of these differences.
rollout_logprobs_abs_diff_p50 | nats | Median of these differences.
rollout_logprobs_abs_diff_p90 | nats | 90th percentile of these differences.
rollout_logprobs_abs_diff_p99 | nats | 99th percentile of these differences.
rollout_logprobs_diff_mean | nats | Mean of `old_logprobs` - `rollout_logprobs`; near 0 if the difference is noise.
is_effective_share | fraction | Effective sample size of the ratios exp(`old_logprobs` - `rollout_logprobs`), divided
    by the number of trained tokens; 1 if all ratios are equal.
num_groups | groups | Groups in the mini-batch.
num_trained_groups | groups | Groups with a gradient, that is, with a trained token whose advantage is not 0.
num_trajectories | trajectories | Trajectories in the mini-batch.
num_failed | trajectories | Failed trajectories.
num_masked | trajectories | Trajectories that failed or are masked.
return_mean | reward | Mean return of trajectories that did not fail; null if all failed.
reward/avg_raw_reward | reward | Mean return of the batch's trajectories that did not fail. This and the next five
    metrics, with SkyRL's names, are about the entire batch, and the same on each of its lines.
reward/mean_positive_reward | reward | Mean return, with negative returns as 0.
reward/avg_pass_at_n | fraction | Groups with a return above 0, as a fraction of groups with a trajectory that did not
    fail.
loss/avg_final_rewards | reward | Mean return of the trained trajectories.
loss/avg_raw_advantages | 1 | Mean advantage of the trained tokens, before `advantage.batch_normalize`.
loss/avg_raw_advantages_abs | 1 | Mean of the absolute values of these advantages.
loss/avg_kl | nats | Mean estimate of the batch's KL divergence from the reference, per trained token; this and the
    next two metrics exist only with `kl_reward_coef`.
loss/avg_kl_max | nats | Largest of these estimates.
loss/kl_reward_coef | 1 | Coefficient with which these estimates are subtracted from rewards.
critic/critic_loss | 1 | Mean clipped value loss over the trained tokens; `critic/` metrics exist only with a critic.
critic/values_mean | reward | Mean value at the trained tokens.
critic/values_clipfrac | fraction | Trained tokens whose value loss has no gradient because the value is clipped.
critic/grad_norm | 1 | L2 norm of the critic's gradient before clipping; null if not finite (then no step is taken).
generate/num_seq_before_merge | sequences | Turns in the batch. All metrics named `generate/...` or `environment/...`
    appear only on the first line of a batch; the two merge metrics only with `sequence_layout` merge.
generate/num_seq_after_merge | sequences | Sequences after merging.
generate/batch_num_seq | sequences | Sequences in the batch.
num_rows | rows | Rows of the mini-batch, in `sequence_layout`.
num_greedy_rows | rows | Rows excluded from training because they were sampled at temperature 0.
num_truncated_rows | rows | Rows with tokens cut off by `max_row_tokens`.
learning_rate | 1 | The policy's learning rate in this update.
seconds | s | Duration of the update; the first of a batch includes loading and the `old_logprobs` pass.
tokens_per_s | tokens/s | `num_forwarded_tokens` divided by `seconds`.
""")

LOOP_METRICS = _metrics("""
iteration | iterations | Iteration of the update, counted from 0; for an evaluation, the number of completed
    iterations.
staleness_mean | iterations | Mean over the iteration's rows of `iteration` - `policy_version`; this and the following
    keys up to `sync_seconds` appear only on the first line of an iteration.
staleness_max | iterations | Largest staleness.
staleness_histogram | rows | Rows by staleness: an object, `{"0": 28, "1": 4}`.
response_tokens_mean | tokens | Mean number of sampled tokens per trajectory.
steps_mean | rows | Mean number of calls per trajectory.
num_dropped_groups | groups | Zero-variance groups that were dropped and replaced since the previous iteration; only
    with `drop_zero_variance_groups`.
num_audited_rows | rows | Rows that were audited (`audit_rows`).
num_mismatched_rows | rows | Audited rows that were not sampled as labelled.
wait_seconds | s | Time that the trainer waited for the iteration's groups.
sync_seconds | s | Time to write the weights with which the iteration starts, and to load them.
evaluation/return_mean | reward | Mean return of an evaluation's trajectories that did not fail, over all sets; this
    and the following metrics are on separate lines.
evaluation/num_trajectories | trajectories | Number of trajectories.
evaluation/num_failed | trajectories | Number of failed trajectories.
eval/{source}/avg_score | reward | Mean return per `data_source` (`/` replaced by `_`; `unknown` if a task has none),
    and for `all`; also `mean_positive_reward`, with negative returns as 0.
eval/{source}/pass_at_{n} | fraction | Probability that at least one of n trajectories of a task, drawn without
    replacement, has a return above 0, for n from 1 to `group_size`. It is a mean over tasks with at least n
    trajectories that did not fail.
eval/{name}/..., eval/{name}/{source}/... |  | With evaluation sets (`[evaluate.NAME]`), these replace the two keys
    above: one value per set, and one per `data_source` of its tasks.
""")
"""Keys that `rollouts rl` adds."""
