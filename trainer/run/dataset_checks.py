"""What `trainer.checks` needs to know of a dataset, and notes about it."""

from __future__ import annotations

from logging import WARNING

import numpy as np
import polars as pl

import rollout_io
from pipelines.rewards import with_version
from pipelines.sampling_defaults import (
    COLUMNS,
    FILE,
    NEUTRAL,
    missing_columns,
    sampling_defaults,
    sampling_extra_of,
)
from schemas.errors import count
from trainer import checks
from trainer.batches.forest import RowLimit
from trainer.batches.pictures import PictureReader
from trainer.batches.plan import Plan
from trainer.config.train_config import TrainConfig
from trainer.models.policy import Policy
from trainer.run.messages import Remark
from trainer.run.model_checks import check_replay, open_pictures
from trainer.run.run import Run
from trainer.run.warnings import warnings_before


def check_dataset(
    run: Run, index: pl.DataFrame, plan: Plan, *, must_learn: bool
) -> tuple[bool, PictureReader | None, dict[str, Remark]]:
    """Check every row of a run's dataset, indexed by `trainer.batch.index_rows`.

    With `must_learn`, a dataset from which nothing can be learned is rejected.

    Returns:
        Whether importance weights and masks apply, what reads the pictures to show, and notes and
        warnings by subject.

    Raises:
        RolloutError: A row cannot be trained on as configured.
    """
    config, size, limit = run.config, run.vocab_size, run.row_limit
    rows = check_rows(index, plan, config, vocab_size=size, limit=limit, must_learn=must_learn)
    remarks = dict[str, Remark]()
    if num_greedy := num_greedy_rows(index, plan):
        text = (
            f"{count(num_greedy, 'row')} sampled at temperature 0 will be excluded from training:"
        )
        remarks["greedy"] = Remark(f"{text} greedy samples have no gradient", WARNING)
    if rows.is_empty():
        return config.loss.corrects_for_sampler, None, remarks
    pictures = open_pictures(run, rows)
    # As stored: `run.rollouts` has the columns that `data.sampling_defaults` fills in.
    rollouts = rollout_io.scan(config.data.dataset)
    metadata = rollout_io.read_metadata(config.data.dataset)
    if "sampling_extra" not in rollouts.collect_schema():
        extra = pl.lit(sampling_extra_of(metadata.made_by), pl.String)
        rows = rows.with_columns(pl.col("sampling_extra").fill_null(extra))
    if unknown := check_sampling(rows, config):
        remarks["sampling"] = Remark(f"note: {unknown}")
    corrects = check_rollout_logprobs(rows, config, metadata.logprobs_mode)
    if config.loss.corrects_for_sampler and not corrects:
        text = "note: importance correction (tis_ratio_type) is off, because the dataset has no"
        remarks["corrects"] = Remark(f"{text} rollout_logprobs")
    replaying = {config.model.path: run.whole_policy.model}  # the critic uses no recorded experts
    if isinstance(run.reference, Policy):
        replaying[config.loss.reference_model or config.model.path] = run.reference.model
    if routing := check_replay(rollouts, replaying, rows, config):
        remarks["routing"] = Remark(routing, WARNING)
    if most := config.batch.max_row_tokens:
        cut, lost, larger = cut_rows(rows, most, limit.num_tokens)
        remarks |= {"truncated_rows": Remark(f"note: {cut}")} if cut else {}
        remarks |= {"cut_rows": Remark(f"{lost}\nHint: {larger}", WARNING)} if lost else {}
    texts = warnings_before(rows, plan, config)
    remarks |= {name: Remark(text, WARNING) for name, text in texts.items()}
    return corrects, pictures, remarks


def check_rows(
    index: pl.DataFrame,
    plan: Plan,
    config: TrainConfig,
    *,
    vocab_size: int,
    limit: RowLimit,
    must_learn: bool = True,
) -> pl.DataFrame:
    """Check rows against the models and the configuration, and return the rows to train on.

    `index` is the result of `trainer.batch.index_rows`. Token ids must be below
    `vocab_size`. With `must_learn`, rows from which nothing can be learned are rejected.

    Raises:
        InvariantError, InputError: A row breaks a rule (the error names the first such row), or
            there is no row to train on.
    """
    masks = plan.trajectories.select("trajectory_id", "trains", "advantage")
    rows = index.join(masks, on="trajectory_id", maintain_order="left")
    checks.refuse(rows, checks.ROWS, config)
    rows = rows.filter(pl.col("trains") & (pl.col("num_trained_tokens") > 0))
    facts = _facts(rows, plan, config, limit)
    if must_learn:
        checks.refuse(facts, checks.LEARNING, config)
    checks.refuse(rows.with_columns(vocab_size=pl.lit(vocab_size)), checks.TRAINED, config)
    if len(rows):
        checks.refuse(facts, [checks.TAUGHT], config)
    # A merged row and its longest step end with the same trained token, so their costs are equal.
    forwarded = rows["num_forwarded_tokens"].clip(upper_bound=config.batch.max_row_tokens)
    limit.check(forwarded.to_numpy(), rows["name"].to_list())
    return rows


def _facts(rows: pl.DataFrame, plan: Plan, config: TrainConfig, limit: RowLimit) -> pl.DataFrame:
    most = config.batch.max_row_tokens
    _, lost, longer = cut_rows(rows, most, limit.num_tokens) if most and len(rows) else ("",) * 3
    return rows.select(
        name=pl.lit(config.data.dataset),
        num_rows=pl.len(),
        num_with_advantage=(pl.col("advantage") != 0).sum(),
        groups=pl.lit(count(sum(map(len, plan.batches)), "group")),
        num_within_length=(pl.col("num_untrained_at_start") < (most or 0)).sum(),
        lost=pl.lit(lost),
        longer=pl.lit(longer),
        most_teacher_ids=pl.col("most_teacher_ids").max().fill_null(0),
    )


def num_greedy_rows(index: pl.DataFrame, plan: Plan) -> int:
    """Count rows of trained trajectories that are left out because their temperature is 0."""
    trained = plan.trajectories.filter("trains")["trajectory_id"]
    return index.filter(pl.col("greedy") & pl.col("trajectory_id").is_in(trained.implode())).height


def scan_rows(config: TrainConfig) -> pl.LazyFrame:
    """Scan the dataset, with the rewards of the version `config.data.reward`.

    `config.data.sampling_defaults` fills in the settings that rows do not record.
    """
    rows = rollout_io.scan(config.data.dataset)
    if config.data.reward is not None:
        rows = with_version(rows, config.data.dataset, config.data.reward)
    if config.data.sampling_defaults is None:
        return rows
    is_of_model = config.data.sampling_defaults == "model"
    defaults = sampling_defaults(config.model.path) if is_of_model else None
    return (defaults or NEUTRAL).fill(rows)


def check_sampling(rows: pl.DataFrame, config: TrainConfig) -> str | None:
    """Check rows to train on that do not record all sampling settings.

    A loss without importance ratios and advantages (`cross_entropy`) may imitate any text.

    Returns:
        A note about rows that count as sampled at temperature 1 without truncation, if any.

    Raises:
        InputError: `sampling_defaults`: the model's `generation_config.json` has other settings.
    """
    missing = rows.filter(missing_columns())
    if config.loss.is_supervised or missing.is_empty():
        return None
    if defaults := sampling_defaults(config.model.path):
        facts = missing.with_columns(
            relies_on_defaults=defaults.are_unknown(),
            file=pl.lit(f"{config.model.path}/{FILE}"),
            defaults=pl.lit(defaults.text),
        )
        checks.refuse(facts, [checks.SAMPLING], config)
    names = [name for name in COLUMNS if missing[name].is_null().any()]
    return (
        f"{count(len(missing), 'row')} of an engine without a recorded {' or '.join(names)}: trained"
        " as sampled at temperature 1 without truncation, unless recorded"
    )


def check_rollout_logprobs(
    rows: pl.DataFrame, config: TrainConfig, logprobs_mode: str | None
) -> bool:
    """Return whether importance weights or masks are configured and `rollout_logprobs` exist.

    Without `rollout_logprobs`, default weights are switched off; explicitly requested ones are an
    error.

    Raises:
        InvariantError, InputError: Only some rows have log-probabilities; these are not from the
            sampled distribution; or no row has any, but the loss or a mask needs them.
    """
    loss = config.loss
    if not (loss.corrects_for_sampler or loss.is_anchored_on_sampler):
        return False
    if rows["has_logprobs"].any():
        mode = pl.lit(logprobs_mode, pl.String)
        checks.refuse(rows.with_columns(logprobs_mode=mode), checks.LOGPROBS, config)
        return loss.corrects_for_sampler
    needing = {
        f"policy_loss_type {loss.policy_loss_type}": loss.is_anchored_on_sampler,
        "a mask based on importance ratios": loss.masks_by_ratio,
        f"tis_ratio_type {loss.tis_ratio_type}": loss.tis_ratio_type in ("token", "sequence"),
    }
    setting = next((name for name, needs in needing.items() if needs), None)
    facts = pl.DataFrame({"name": config.data.dataset, "needing": setting})
    checks.refuse(facts, [checks.WITHOUT_LOGPROBS], config)
    return False


def cut_rows(rows: pl.DataFrame, most: int, limit: int) -> tuple[str, str, str]:
    """Describe the rows that lose trained tokens to `max_row_tokens`, with a larger value.

    Args:
        rows: Rows to train on, as indexed by `trainer.batch.index_rows`; not empty.
        most: The value of `max_row_tokens`.
        limit: Maximum row length of the model, in tokens.

    Returns:
        The rows that are truncated, and those without any token to train on (each "" if there are
        none), and a hint with the value that leaves tokens in nine of ten rows, if the model allows it.

    Example:
        >>> rows = {
        ...     "num_untrained_at_start": [300, 511, 1200],
        ...     "num_forwarded_tokens": [400, 512, 1300],
        ... }
        >>> for text in cut_rows(pl.DataFrame(rows), 512, 8192):
        ...     print(text)
        2 of 3 rows are truncated at 512 tokens (max_row_tokens); the longest has 1,301 up to its last trained token
        1 of 3 rows have no token to train on within 512 tokens (max_row_tokens)
        batch.max_row_tokens=1280 leaves tokens to train on in 3 of 3 rows
    """
    # The last trained token is at the position `num_forwarded_tokens`, counted from 0.
    last, first = rows["num_forwarded_tokens"].to_numpy(), rows["num_untrained_at_start"].to_numpy()
    of, within = f"of {count(len(rows), 'row')}", f"{count(most, 'token')} (max_row_tokens)"
    num_cut, num_lost = int((last >= most).sum()), int((first >= most).sum())
    cut = (
        f"{num_cut:,} {of} are truncated at {within}; the longest has {last.max() + 1:,} up to its"
    )
    lost = f"{num_lost:,} {of} have no token to train on within {within}"
    needed = int(np.quantile(first, 0.9, method="higher")) + 1
    larger = min(-(-needed // _MULTIPLE) * _MULTIPLE, limit)
    hint = f"batch.max_row_tokens={larger} leaves tokens to train on in {(first < larger).sum():,} {of}"
    return f"{cut} last trained token" if num_cut else "", lost if num_lost else "", hint


_MULTIPLE = 256  # suggested values of `max_row_tokens` are multiples of this, or the model's limit
