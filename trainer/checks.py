"""What a run refuses before anything is trained: rows that cannot train as they are asked to."""

from __future__ import annotations

import polars as pl

from schemas.errors import RolloutError
from schemas.metadata import DatasetMetadata
from trainer.config import TrainConfig
from trainer.forest import RowLimit
from trainer.plan import TOKEN_ESTIMATORS, Plan

RECORD_MODE = (
    "convert with --logprobs-mode, or pass metadata=rollout_io.read_metadata(DS) when rewriting a"
    " dataset"
)
VALIDATE = "`rollouts validate DATASET` lists every such row"


def check_rows(
    index: pl.DataFrame,
    plan: Plan,
    config: TrainConfig,
    *,
    vocab_size: int,
    limit: RowLimit,
    must_learn: bool = True,
) -> pl.DataFrame:
    """Check the rows of an index against the model and the configuration.

    Args:
        index: What `trainer.data.index_rows` returns.
        plan: The run's plan.
        config: The run's configuration.
        vocab_size: The model's token ids are 0 to vocab_size - 1.
        limit: The longest row that can be forwarded.
        must_learn: Refuse rows of which nothing can be learned.

    Returns:
        The rows of `index` that train.

    Raises:
        RolloutError: Names the rule and the first row that breaks it; or nothing trains at all.
    """
    masks = plan.trajectories.select("trajectory_id", "trains", "advantage")
    rows = index.join(masks, on="trajectory_id", maintain_order="left")
    _check_order(rows)
    _check_lists(rows)
    if config.advantage_estimator in TOKEN_ESTIMATORS:
        _check_step_rewards(rows, config.advantage_estimator)
    rows = rows.filter(pl.col("trains") & (pl.col("num_trained_tokens") > 0))
    if must_learn:
        _refuse_nothing_to_learn(rows, plan, config)
    _check_tokens(rows, vocab_size)
    # The last trained token of a merged row is that of its longest step: both forward as many tokens.
    limit.check(rows["num_forwarded_tokens"].to_numpy(), rows["name"].to_list())
    return rows


def _check_order(rows: pl.DataFrame) -> None:
    """What is estimated along a trajectory takes its rows as they lie there."""
    number = pl.col("step_index")
    begins = (pl.col("trajectory_id") != pl.col("trajectory_id").shift()).fill_null(value=True)
    rows = rows.with_columns(
        again=begins & ~pl.col("trajectory_id").is_first_distinct(),
        moved=~begins & (pl.col("instance_id") != pl.col("instance_id").shift()),
        back=~begins & (number <= number.shift()),
    )
    for breach, rule, got, expected in (
        ("again", "contiguous_trajectory", "its rows in several places", "side by side"),
        ("moved", "unique_trajectory", "another instance_id than the row before", "the same"),
        ("back", "step_index_sequence", "a step_index not above the one before", "a later step"),
    ):
        _refuse(rows, pl.col(breach), rule, pl.lit(got), expected, VALIDATE)


def _check_lists(rows: pl.DataFrame) -> None:
    _refuse(
        rows, ~pl.col("complete"), "columns_and_types", pl.lit("null among the tokens"),
        "none in prompt_token_ids, response_ids and loss_mask", VALIDATE,
    )  # fmt: skip
    _refuse(
        rows, ~pl.col("aligned"), "lengths_align", pl.lit("lists of different lengths"),
        "loss_mask, rollout_logprobs and rewards with one element per response token", VALIDATE,
    )  # fmt: skip


def _check_step_rewards(rows: pl.DataFrame, estimator: str) -> None:
    """What is estimated token by token adds up what each step earned."""
    _refuse(
        rows, pl.col("trains") & ~pl.col("has_reward"), "unknown_reward",
        pl.lit("null, neither reward nor rewards"),
        f"what each step earned: {estimator} adds it up",
        "pipelines.place_outcomes gives a trajectory's reward to its last step, 0 to the others",
    )  # fmt: skip
    _refuse(
        rows, pl.col("trains") & ~pl.col("finite_reward"), "reward_finite",
        pl.lit("a reward that is not finite"), "finite rewards", VALIDATE,
    )  # fmt: skip


def _check_tokens(rows: pl.DataFrame, vocab_size: int) -> None:
    """They follow a prompt, are of the model's vocabulary, and were drawn from a distribution."""
    _refuse(
        rows, pl.col("num_prompt_tokens") == 0, "nonempty_prompt", pl.lit("0 prompt tokens"),
        "at least one", VALIDATE,
    )  # fmt: skip
    for name, breach in {
        "lowest_token": pl.col("lowest_token") < 0,
        "highest_token": pl.col("highest_token") >= vocab_size,
    }.items():
        _refuse(
            rows, breach, "token_range", pl.format("token id {}", name),
            f"0 to {vocab_size - 1}, the model's vocabulary",
            "train the model whose tokenizer made these ids",
        )  # fmt: skip
    _refuse(
        rows, ~pl.col("temperature").is_between(0, float("inf"), closed="none"), "temperature", pl.format("{}", "temperature"),
        "finite and above 0: greedy samples have no distribution to train", "filter these rows out",
    )  # fmt: skip


def _refuse_nothing_to_learn(rows: pl.DataFrame, plan: Plan, config: TrainConfig) -> None:
    """A run of which no update would have a gradient; what has one of its own is let through."""
    if rows.is_empty():
        raise RolloutError(
            "mask_trains_something", config.dataset, "no token that trains", "at least one",
            "every loss_mask is false, every group failed, or no group has variance",
        )  # fmt: skip
    others = config.needs_reference or config.entropy_loss_coef > 0
    per_token = config.advantage_estimator in TOKEN_ESTIMATORS
    if others or per_token or config.policy_loss_type == "cross_entropy":
        return
    if (rows["advantage"] == 0).all():
        num_groups = sum(map(len, plan.batches))
        raise RolloutError(
            "zero_advantages",
            config.dataset,
            f"advantages of 0 alone in {num_groups} groups",
            "a group whose trained trajectories have different returns",
            "rollouts stats DS shows the rewards; other ones (convert --rewards) or more attempts"
            " (generate with a larger group_size) may help",
        )


def corrects_for_sampler(
    rows: pl.DataFrame, config: TrainConfig, logprobs_mode: str | None
) -> bool:
    """Whether importance weights and masks apply: asked for, and the rows have `rollout_logprobs`.

    Without them, the weights that are on by default are off; what was asked for is refused.

    Args:
        rows: The rows that train.
        config: The run's configuration.
        logprobs_mode: What the dataset says its `rollout_logprobs` are. Unknown counts as raw,
            which only matters where raw ones are not those of the sampled distribution.

    Raises:
        RolloutError: Only a part of the rows has log-probabilities, or they are not those of the
            distribution that was sampled; or none has, and the loss or a mask needs them.
    """
    if not (config.corrects_for_sampler or config.is_anchored_on_sampler):
        return False
    if not rows["has_logprobs"].any():
        _refuse_without_logprobs(config)
        return False
    off = "--set tis_ratio_type=none trains without the correction"
    if config.is_anchored_on_sampler or config.masks_by_ratio:
        off = "train without what has importance ratios: another policy_loss_type, no masks by them"
    _refuse(
        rows, ~pl.col("has_logprobs"), "rollout_logprobs", pl.lit("null, though others have them"),
        "log-probabilities in every row that trains, or in none", off,
    )  # fmt: skip
    for rule, expected in {
        "logprobs_finite": "finite log-probabilities",
        "logprobs_nonpositive": "log-probabilities of at most 0",
    }.items():
        _refuse(rows, ~pl.col(rule), rule, pl.lit("others"), expected, VALIDATE)
    if not config.allow_mismatched_logprobs:
        off += "; --set allow_mismatched_logprobs=true corrects all the same"
        _refuse_mismatched_logprobs(rows, logprobs_mode, off)
    return config.corrects_for_sampler


def _refuse_mismatched_logprobs(rows: pl.DataFrame, logprobs_mode: str | None, off: str) -> None:
    """Log-probabilities that are not those of the distribution that was sampled."""
    _refuse(
        rows, pl.col("token_source") == "retokenized", "rollout_logprobs",
        pl.lit("log-probabilities of re-tokenized text"), "those of the engine's own tokens", off,
    )  # fmt: skip
    if logprobs_mode is None:
        off = f"{RECORD_MODE}; else {off}"
    if logprobs_mode != "processed":
        sampled = ("temperature", "top_p", "top_k")
        temperature, top_p, top_k = (pl.col(name) for name in sampled)
        _refuse(
            rows,
            (temperature != 1) | (top_p < 1) | (top_k > 0),
            "rollout_logprobs",
            pl.format(
                f"logprobs_mode {logprobs_mode or 'unknown'} at temperature {{}}, top_p {{}}, top_k {{}}",
                *(pl.col(name).cast(pl.String).fill_null("unset") for name in sampled),
            ),
            "log-probabilities of the distribution that was sampled",
            off,
        )  # fmt: skip


def refuse_unseen_truncation(metadata: DatasetMetadata, config: TrainConfig) -> None:
    """Refuse raw log-probabilities of what was generated with `min_p`, which no column says.

    Args:
        metadata: The dataset's; its history holds the configuration that it was generated with.
        config: The run's configuration, which corrects for the sampler.

    Raises:
        RolloutError: rollout_logprobs.
    """
    if metadata.logprobs_mode == "processed" or config.allow_mismatched_logprobs:
        return
    for made in metadata.made_by:
        generated = made.get("config")
        min_p = generated.get("min_p") if isinstance(generated, dict) else None
        if min_p:
            got = f"logprobs_mode {metadata.logprobs_mode or 'unknown'} at min_p {min_p}"
            hint = "start vLLM with --logprobs-mode processed_logprobs, or generate without min_p"
            expected = "log-probabilities of the distribution that was sampled"
            raise RolloutError("rollout_logprobs", config.dataset, got, expected, hint)


def _refuse_without_logprobs(config: TrainConfig) -> None:
    needing = {
        f"policy_loss_type {config.policy_loss_type}": config.is_anchored_on_sampler,
        "a mask by importance ratios": config.masks_by_ratio,
        f"tis_ratio_type {config.tis_ratio_type}": config.tis_ratio_type in ("token", "sequence"),
    }
    for name, needs in needing.items():
        if needs:
            expected, hint = (
                f"the sampler's log-probabilities, for {name}",
                "record them, or set others",
            )
            raise RolloutError("rollout_logprobs", config.dataset, "none", expected, hint)


def _refuse(
    rows: pl.DataFrame, breach: pl.Expr, rule: str, got: pl.Expr, expected: str, hint: str
) -> None:
    bad = rows.filter(breach)
    if len(bad):
        where = f"{bad['name'][0]} (the first of {len(bad)})"
        raise RolloutError(rule, where, bad.select(got).item(0, 0), expected, hint)
