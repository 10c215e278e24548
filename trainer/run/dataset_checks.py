"""Reject rows that cannot be used for training as configured, before the first update."""

from __future__ import annotations

import dataclasses

import numpy as np
import polars as pl

from pipelines.rewards import are_equal
from schemas.errors import InputError, InvariantError, count, first_of
from schemas.rules import RULES
from trainer.batches.forest import RowLimit
from trainer.batches.plan import Plan, make_plan, num_groups_of_one
from trainer.config.functions import ADVANTAGE_ESTIMATOR
from trainer.config.sections import BatchConfig
from trainer.config.train_config import TrainConfig

RECORD_MODE = (
    "convert with --logprobs-mode, or pass metadata=rollout_io.read_metadata(DS) when rewriting a"
    " dataset"
)
MOST_SAID = 80
"""Maximum length of a JSON value in a message, in characters."""
IMITATE = "--set loss.policy_loss_type=cross_entropy"
PICTURES = "its messages have images, which training does not show to the model"
AS_TEXT = "pass --set data.images=text to train on the tokens alone, or filter out these rows"
VALIDATE = "run `rollouts validate DATASET` to list all such rows"


def check_rows(
    index: pl.DataFrame,
    plan: Plan,
    config: TrainConfig,
    *,
    vocab_size: int,
    limit: RowLimit,
    must_learn: bool = True,
) -> pl.DataFrame:
    """Check rows against the model and the configuration, and return the rows to train on.

    `index` is the result of `trainer.batches.data.index_rows`. Token ids must be below
    `vocab_size`. With `must_learn`, rows from which nothing can be learned are rejected.

    Raises:
        InvariantError, InputError: A row breaks a rule (the error names the first such row), or
            there is no row to train on.
    """
    masks = plan.trajectories.select("trajectory_id", "trains", "advantage")
    rows = index.join(masks, on="trajectory_id", maintain_order="left")
    _check_order(rows)
    _check_lists(rows)
    if config.advantage.by_token:
        _check_step_rewards(rows, config.advantage.estimator)
    rows = rows.filter(pl.col("trains") & (pl.col("num_trained_tokens") > 0))
    if must_learn:
        _refuse_nothing_to_learn(rows, plan, config)
        refuse_all_cut(rows, config, limit.num_tokens)
    if config.data.images == "refuse":
        _refuse(rows, pl.col("has_images"), "images_in_row", PICTURES, hint=AS_TEXT)
    _check_tokens(rows, vocab_size)
    # A merged row and its longest step end with the same trained token, so their costs are equal.
    forwarded = rows["num_forwarded_tokens"].clip(upper_bound=config.batch.max_row_tokens)
    limit.check(forwarded.to_numpy(), rows["name"].to_list())
    return rows


def num_greedy_rows(index: pl.DataFrame, plan: Plan) -> int:
    """Count rows of trained trajectories that are left out because their temperature is 0."""
    trained = plan.trajectories.filter("trains")["trajectory_id"]
    return index.filter(pl.col("greedy") & pl.col("trajectory_id").is_in(trained.implode())).height


def _check_order(rows: pl.DataFrame) -> None:
    """Check that rows are in the order that token-level estimators require."""
    number = pl.col("step_index")
    begins = (pl.col("trajectory_id") != pl.col("trajectory_id").shift()).fill_null(value=True)
    rows = rows.with_columns(
        again=begins & ~pl.col("trajectory_id").is_first_distinct(),
        moved=~begins & (pl.col("instance_id") != pl.col("instance_id").shift()),
        back=~begins & (number <= number.shift()),
    )
    got = "the rows of this trajectory are not contiguous"
    _refuse(rows, pl.col("again"), "contiguous_trajectory", got)
    got = "its instance_id differs from the instance_id of the previous row"
    _refuse(rows, pl.col("moved"), "unique_trajectory", got)
    got = "its step_index is not greater than in the previous row"
    _refuse(rows, pl.col("back"), "step_index_sequence", got)


def _check_lists(rows: pl.DataFrame) -> None:
    got = "prompt_token_ids, response_ids or loss_mask contains null"
    _refuse(rows, ~pl.col("complete"), "columns_and_types", got)
    got = "loss_mask, rollout_logprobs or rewards is not as long as response_ids"
    _refuse(rows, ~pl.col("aligned"), "lengths_align", got)


def _check_step_rewards(rows: pl.DataFrame, estimator: str) -> None:
    """Check that steps have valid rewards, because token-level estimators sum them."""
    rows = rows.filter("trains")
    got = f"reward and rewards are null, but {estimator} needs the reward of every step"
    hint = "use pipelines.place_outcomes to give a trajectory's reward to its last step, and 0 to the others"
    _refuse(rows, ~pl.col("has_reward"), "unknown_reward", got, hint=hint)
    got = "reward or rewards contains NaN or infinity"
    _refuse(rows, ~pl.col("finite_reward"), "reward_finite", got)


def _check_tokens(rows: pl.DataFrame, vocab_size: int) -> None:
    """Check that prompts are not empty, and that token ids and temperatures are valid."""
    is_empty = pl.col("num_prompt_tokens") == 0
    _refuse(rows, is_empty, "nonempty_prompt", "0 prompt tokens", "at least one")
    expected = f"an id from 0 to {vocab_size - 1}, the model's vocabulary"
    hint = "train the model whose tokenizer produced these ids"
    for name, breach in {
        "lowest_token": pl.col("lowest_token") < 0,
        "highest_token": pl.col("highest_token") >= vocab_size,
    }.items():
        _refuse(rows, breach, "token_range", pl.format("token id {}", name), expected, hint)
    is_valid = pl.col("temperature").is_between(0, float("inf"), closed="none")
    got, expected = pl.format("temperature {}", "temperature"), "a finite temperature of at least 0"
    _refuse(rows, ~is_valid, "temperature", got, expected, "filter out these rows")


def _refuse_nothing_to_learn(rows: pl.DataFrame, plan: Plan, config: TrainConfig) -> None:
    """Reject a run in which no row has a gradient, unless KL or entropy terms may provide one."""
    if rows.is_empty():
        raise InvariantError(
            "mask_trains_something",
            config.data.dataset,
            "there are no tokens to train on",
            hint="look for loss masks that are all false, failed trajectories, groups without variance,"
            " and rows sampled at temperature 0",
        )
    if not _learns_without_advantages(config) and (rows["advantage"] == 0).all():
        raise _zero_advantages(plan, config)


def plan_of(returns: pl.DataFrame, config: TrainConfig) -> Plan:
    """Plan a run with `make_plan`.

    With `partial_groups=refuse`, partial groups are an error. If all advantages would be 0 even with
    `partial_groups=train`, that error is `zero_advantages`, because its hint is more useful.

    Args:
        returns: See `make_plan`.
        config: Configuration of the run.

    Raises:
        InvariantError, InputError: See `make_plan`; or every advantage is 0.
    """
    try:
        return make_plan(returns, config)
    except InputError as error:
        # A user's estimator may need complete groups, and may compare them with each other.
        is_built_in = config.advantage.estimator in ADVANTAGE_ESTIMATOR.built_in
        if error.rule != "partial_groups" or not is_built_in or _learns_without_advantages(config):
            raise
        data = dataclasses.replace(config.data, partial_groups="train")
        config = dataclasses.replace(config, data=data)
        plan = make_plan(returns, config)
        trained = plan.trajectories.filter("trains")
        if len(trained) and (trained["advantage"] == 0).all():
            raise _zero_advantages(plan, config) from None
        raise


def _learns_without_advantages(config: TrainConfig) -> bool:
    """True if the loss may have a gradient even if all trajectory advantages are 0."""
    has_other_terms = config.loss.needs_reference or config.loss.entropy_loss_coef > 0
    has_other_loss = (
        config.loss.is_supervised or config.loss.has_own_loss or config.advantage.by_token
    )
    return has_other_terms or has_other_loss


def _zero_advantages(plan: Plan, config: TrainConfig) -> InputError:
    num_groups, num_lost = sum(map(len, plan.batches)), _num_lost_to_failures(plan, config)
    got = "every advantage is 0, because returns do not vary within any group"
    got += f" ({count(num_groups, 'group')})"
    hint = "run `rollouts stats DS` to see the rewards, then supply rewards that differ within a group (convert"
    hint += " --rewards) or sample more attempts (generate with a larger group_size)"
    if config.compares_groups and num_groups_of_one(plan) == num_groups:
        hint = f"every group has one trajectory, and {config.advantage.estimator} compares the trajectories of a group:"
        hint += " if these are attempts at the same tasks, convert them again with --group-by (`rollouts stats DS`"
        hint += " counts the groups); otherwise pass --algorithm reinforce++ or gae, which need no groups"
    best = plan.trajectories.filter("trains").select(pl.col("return").max()).item()
    if best is not None and best > 0:
        hint += f"; or choose the rows (`rollouts filter DS --where 'return > 0' --out GOOD`) and imitate them ({IMITATE})"
    else:  # the condition `reward > 0` would leave no rows
        hint += f"; or choose rows to imitate ({IMITATE})"
    if num_lost:
        got += f", except in {count(num_lost, 'group')} with a failed trajectory"
        hint = "pass --set data.failed=trajectory to leave out failed trajectories instead of their groups"
    return InputError("zero_advantages", config.data.dataset, got, hint=hint)


def _num_lost_to_failures(plan: Plan, config: TrainConfig) -> int:
    """Count the groups with varying returns that are masked only because a trajectory failed."""
    is_masked_anyway = config.data.partial_groups == "mask" and plan.num_partial_groups
    if config.data.failed != "group" or is_masked_anyway:
        return 0
    known = pl.when(~pl.col("failed")).then("return").fill_nan(None)
    groups = plan.trajectories.group_by("instance_id").agg(
        lost=pl.col("failed").any() & ~pl.col("trains").any(),
        varies=(known.count() > 1) & ~are_equal(known),
    )
    return groups.filter("lost", "varies").height


def check_teacher(rows: pl.DataFrame, config: TrainConfig) -> None:
    """Check that every row has a teacher's log-probabilities, if the loss is `distill`.

    Raises:
        InputError: `teacher_logprobs`: a row has none, or no token has more than one id.
    """
    if config.loss.policy_loss_type == "distill":
        got = "teacher_logprobs or teacher_token_ids is null, and distill needs both"
        hint = "add a teacher's log-probabilities to all rows, or drop the rows without them"
        _refuse(rows, ~pl.col("has_teacher"), "teacher_logprobs", got, hint=hint)
        if not (rows["most_teacher_ids"] > 1).any():
            got = "no token has more than one teacher id, and a distribution over one id has no gradient"
            hint = "record at least the teacher's two most likely ids at each trained token"
            raise InputError("teacher_logprobs", config.data.dataset, got, hint=hint)


def corrects_for_sampler(
    rows: pl.DataFrame, config: TrainConfig, logprobs_mode: str | None
) -> bool:
    """Return whether importance weights or masks are configured and `rollout_logprobs` exist.

    Without `rollout_logprobs`, default weights are switched off; explicitly requested ones are an
    error. An unknown `logprobs_mode` is treated as raw, which matters only if raw log-probabilities
    differ from the log-probabilities of the sampled distribution. Processed ones of truncated
    sampling need `sampling_support`: the policy gives the kept tokens less than their probability.

    Raises:
        InvariantError, InputError: Only some rows have log-probabilities; these are not from the
            sampled distribution; or no row has any, but the loss or a mask needs them.
    """
    if not (config.loss.corrects_for_sampler or config.loss.is_anchored_on_sampler):
        return False
    if not rows["has_logprobs"].any():
        _refuse_without_logprobs(config)
        return False
    off = "pass --set loss.tis_ratio_type=none to train without the correction"
    if config.loss.is_anchored_on_sampler or config.loss.masks_by_ratio:
        off = "train with a policy_loss_type and masks that need no importance ratios"
    got = "rollout_logprobs is null here but present in other rows to train on"
    _refuse(rows, ~pl.col("has_logprobs"), "rollout_logprobs", got, hint=off)
    for rule, got in {
        "logprobs_finite": "rollout_logprobs contains null, NaN or infinity",
        "logprobs_nonpositive": "rollout_logprobs contains a value above 0",
    }.items():
        _refuse(rows, ~pl.col(rule), rule, got)
    if not config.loss.allow_mismatched_logprobs:
        off += ", or --set loss.allow_mismatched_logprobs=true to correct anyway"
        _refuse_mismatched_logprobs(rows, logprobs_mode, off)
    return config.loss.corrects_for_sampler


def _refuse_mismatched_logprobs(rows: pl.DataFrame, logprobs_mode: str | None, off: str) -> None:
    """Reject log-probabilities that do not belong to the sampled distribution."""
    got = "its rollout_logprobs belong to re-tokenized text, not to the engine's tokens"
    is_retokenized = pl.col("token_source") == "retokenized"
    _refuse(rows, is_retokenized, "rollout_logprobs", got, hint=off)
    if logprobs_mode is None:
        off = f"{RECORD_MODE}; or {off}"
    sampled = ("temperature", "top_p", "top_k", "sampling_extra")
    temperature, top_p, top_k, extra = (pl.col(name) for name in sampled)
    if logprobs_mode == "processed":
        is_changed = (top_p < 1) | (top_k > 0) | extra.str.contains('"min_p":', literal=True)
        got = "rollout_logprobs cover only the tokens that truncation kept, and sampling_support does not record them"
        usable = "the kept tokens (sampling_support): sample with a top_k of at most 20"
    else:
        is_changed = (temperature != 1) | (top_p < 1) | (top_k > 0) | extra.is_not_null()
        got = "rollout_logprobs are not from the sampled distribution"
        usable = "usable ones, with vLLM's --logprobs-mode processed_logprobs"
    if logprobs_mode != "raw":  # sets are only recorded with log-probabilities over them
        is_changed &= ~pl.col("has_support")
    shown = pl.format(
        f"{got} (logprobs_mode {logprobs_mode or 'unknown'},"
        " temperature {}, top_p {}, top_k {}{})",
        *(pl.col(name).cast(pl.String).fill_null("unset") for name in sampled[:3]),
        (", " + extra.str.slice(0, MOST_SAID)).fill_null(""),
    )
    _refuse(rows, is_changed, "rollout_logprobs", shown, hint=f"{off}; or record {usable}")


def _refuse_without_logprobs(config: TrainConfig) -> None:
    needing = {
        f"policy_loss_type {config.loss.policy_loss_type}": config.loss.is_anchored_on_sampler,
        "a mask based on importance ratios": config.loss.masks_by_ratio,
        f"tis_ratio_type {config.loss.tis_ratio_type}": config.loss.tis_ratio_type
        in ("token", "sequence"),
    }
    for name, needs in needing.items():
        if needs:
            got = f"no row has rollout_logprobs, which {name} needs"
            hint = "record log-probabilities when sampling, or change this setting"
            raise InputError("rollout_logprobs", config.data.dataset, got, hint=hint)


def _refuse(
    rows: pl.DataFrame,
    breach: pl.Expr,
    rule: str,
    got: pl.Expr | str,
    expected: str = "",
    hint: str = VALIDATE,
) -> None:
    bad = rows.filter(breach)
    if len(bad):
        where = first_of(bad["name"][0], len(bad))
        kind = InvariantError if rule in RULES else InputError
        found = got if isinstance(got, str) else bad.select(got).item(0, 0)
        raise kind(rule, where, found, expected, hint)


KEPT_SHARES = (0.75, 0.9, 1)
"""Minimum fraction of rows that each suggested value of `max_row_tokens` keeps."""
_MULTIPLE = 256  # suggested values are multiples of this, or the model's limit


def truncated(rows: pl.DataFrame, config: BatchConfig) -> str | None:
    """Describe the rows that lose trained tokens to `max_row_tokens`; None if there are none.

    Args:
        rows: See `without_tokens`.
        config: Section `[batch]`.

    Example:
        >>> config = BatchConfig(max_row_tokens=512)
        >>> truncated(pl.DataFrame({"num_forwarded_tokens": [400, 511, 512, 1199]}), config)
        '2 of 4 rows are truncated at 512 tokens (max_row_tokens); the longest has 1,200 up to its last trained token'
    """
    most = config.max_row_tokens
    # The last trained token is at the position `num_forwarded_tokens`, counted from 0.
    last = rows["num_forwarded_tokens"]
    if most is None or not (num_cut := int((last >= most).sum())):
        return None
    cut_off = (
        f"{num_cut:,} of {count(len(rows), 'row')} {'is' if num_cut == 1 else 'are'} truncated"
    )
    longest = int(last.to_numpy().max()) + 1
    return (
        f"{cut_off} at {count(most, 'token')} (max_row_tokens); the longest has {longest:,} up to its"
        " last trained token"
    )


def without_tokens(rows: pl.DataFrame, config: BatchConfig) -> str | None:
    """Describe the rows without trainable tokens within `max_row_tokens`; None if there are none.

    Args:
        rows: Rows to train on, as indexed by `trainer.batches.data.index_rows`.
        config: Section `[batch]`.
    """
    most = config.max_row_tokens
    if most is None or not (num_lost := int((rows["num_untrained_at_start"] >= most).sum())):
        return None
    num, held = count(len(rows), "row"), "has" if num_lost == 1 else "have"
    longest = int(rows["num_prompt_tokens"].to_numpy().max())
    return (
        f"{num_lost:,} of {num} {held} no token to train on within max_row_tokens ({most:,}); the"
        f" longest prompt has {longest:,} tokens"
    )


def larger_limits(rows: pl.DataFrame, most: int, limit: int) -> str:
    """Suggest larger values of `max_row_tokens` that leave most rows some tokens to train on.

    Args:
        rows: See `without_tokens`; not empty.
        most: The current value of `max_row_tokens`.
        limit: Maximum row length of the model, in tokens.

    Example:
        >>> rows = pl.DataFrame({"num_untrained_at_start": [300, 500, 500, 1200]})
        >>> larger_limits(rows, 100, 8192)
        'batch.max_row_tokens=512 leaves tokens to train on in 3 of 4 rows, 1280 in 4 of 4'
    """
    at_start = np.sort(rows["num_untrained_at_start"].to_numpy())
    kept = {}
    for share in KEPT_SHARES:
        needed = int(at_start[int(np.ceil(share * len(at_start))) - 1]) + 1
        value = min(-(-needed // _MULTIPLE) * _MULTIPLE, limit)
        if value > most:
            kept[value] = int((at_start < value).sum())
    if not kept:
        return f"filter out these rows: this model supports at most {limit:,} tokens per row"
    (first, num), *more = list(kept.items())[:2]
    text = f"batch.max_row_tokens={first} leaves tokens to train on in {num:,} of"
    text += f" {count(len(at_start), 'row')}"
    return ", ".join([text, *(f"{value} in {num:,} of {len(at_start):,}" for value, num in more)])


def refuse_all_cut(rows: pl.DataFrame, config: TrainConfig, limit: int) -> None:
    """Reject a run in which `max_row_tokens` leaves no row with a token to train on.

    Raises:
        InvariantError: `mask_trains_something`: no row has a token to train on.
    """
    most = config.batch.max_row_tokens
    if most is not None and bool((rows["num_untrained_at_start"] >= most).all()):
        got = without_tokens(rows, config.batch) or ""
        hint = larger_limits(rows, most, limit)
        raise InvariantError("mask_trains_something", config.data.dataset, got, hint=hint)
