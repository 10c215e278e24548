"""What is checked before a run begins: the rules of rows, and facts about the whole dataset.

`check_dataset` applies them before the first update and before anything is written.
"""

from __future__ import annotations

from logging import WARNING

import numpy as np
import polars as pl

import rollout_io
from pipelines.rescoring.versions import with_version
from pipelines.sampling_defaults import (
    COLUMNS,
    FILE,
    NEUTRAL,
    missing_columns,
    sampling_defaults,
)
from rollout_io.formats.parsing.sampling import sampling_extra_of
from schemas.errors import InputError, InvariantError, count
from trainer.batches.forest import RowLimit
from trainer.batches.plan import Plan
from trainer.config.train_config import TrainConfig
from trainer.models.policy import Policy
from trainer.run.advice import warnings_before
from trainer.run.messages import Remark
from trainer.run.routing_checks import check_replay
from trainer.run.row_rules import LOGPROBS, STRUCTURE, TRAINED, Rule, refuse
from trainer.run.run import Run

IMITATE = "--set loss.policy_loss_type=cross_entropy"


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
    refuse(rows, STRUCTURE, config)
    rows = rows.filter(pl.col("trains") & (pl.col("num_trained_tokens") > 0))
    if must_learn:
        _refuse_nothing_to_learn(rows, plan, config, limit)
    refuse(rows.with_columns(vocab_size=pl.lit(vocab_size)), TRAINED, config)
    is_distilled = config.loss.policy_loss_type == "distill"
    if is_distilled and len(rows) and not (rows["most_teacher_ids"] > 1).any():
        got = (
            "no token has more than one teacher id, and a distribution over one id has no gradient"
        )
        hint = "record at least the teacher's two most likely ids at each trained token"
        raise InputError("teacher_logprobs", config.data.dataset, got, hint=hint)
    # A merged row and its longest step end with the same trained token, so their costs are equal.
    forwarded = rows["num_forwarded_tokens"].clip(upper_bound=config.batch.max_row_tokens)
    limit.check(forwarded.to_numpy(), rows["name"].to_list())
    return rows


def num_greedy_rows(index: pl.DataFrame, plan: Plan) -> int:
    """Count rows of trained trajectories that are left out because their temperature is 0."""
    trained = plan.trajectories.filter("trains")["trajectory_id"]
    return index.filter(pl.col("greedy") & pl.col("trajectory_id").is_in(trained.implode())).height


def _refuse_nothing_to_learn(
    rows: pl.DataFrame, plan: Plan, config: TrainConfig, limit: RowLimit
) -> None:
    """Reject a run in which no row has a gradient, unless KL or entropy terms may provide one."""
    got, hint = "there are no tokens to train on", "look for loss masks that are all false, failed"
    hint += " trajectories, groups without variance, and rows sampled at temperature 0"
    if rows.is_empty():
        raise InvariantError("mask_trains_something", config.data.dataset, got, hint=hint)
    loss = config.loss
    has_other_terms = loss.needs_reference or loss.entropy_loss_coef > 0
    learns_otherwise = has_other_terms or loss.is_supervised or loss.has_own_loss
    if not (learns_otherwise or config.advantage.by_token) and (rows["advantage"] == 0).all():
        got = "every advantage is 0, because returns do not vary within any group"
        got += f" ({count(sum(map(len, plan.batches)), 'group')})"
        raise InputError("zero_advantages", config.data.dataset, got, hint=_VARY)
    most = config.batch.max_row_tokens
    if most is not None and bool((rows["num_untrained_at_start"] >= most).all()):
        _, got, hint = cut_rows(rows, most, limit.num_tokens)
        raise InvariantError("mask_trains_something", config.data.dataset, got, hint=hint)


_VARY = (
    "`rollouts stats DS` shows rewards and groups: supply rewards that differ within a group (convert"
    " --rewards), sample more attempts (generate with a larger group_size), or join attempts at the same"
    " task (convert --group-by); if failed trajectories mask the groups that vary, --set"
    " data.failed=trajectory leaves out these trajectories alone; --algorithm reinforce++ and gae need no"
    f" groups; {IMITATE} imitates rows, such as those of `rollouts filter DS --where 'return > 0'`"
)


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
    defaults = sampling_defaults(config.model.path)
    if defaults is not None:
        unset = [pl.when(pl.col(name).is_null()).then(pl.lit(name)) for name in COLUMNS]
        got = pl.lit("the row does not record ") + pl.concat_str(
            unset, separator=" or ", ignore_nulls=True
        )
        got += pl.lit(
            f", and engines sample such requests with {config.model.path}/{FILE} ({defaults.text}): the"
            " gradient would be that of another distribution, and raw rollout_logprobs are not from the"
            " sampled distribution"
        )
        hint = (
            "pass --set data.sampling_defaults=model if the engine used that file, as vLLM and SGLang"
            " do, or =neutral if it sampled at temperature 1 without truncation (vLLM's"
            " --generation-config vllm)"
        )
        rule = Rule("sampling_defaults", defaults.are_unknown(), got, hint=hint)
        refuse(missing, [rule], config)
    names = [name for name in COLUMNS if missing[name].is_null().any()]
    return (
        f"{count(len(missing), 'row')} of an engine without a recorded {' or '.join(names)}: trained"
        " as sampled at temperature 1 without truncation, unless recorded"
    )


def corrects_for_sampler(
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
        refuse(rows.with_columns(logprobs_mode=mode), LOGPROBS, config)
        return loss.corrects_for_sampler
    needing = {
        f"policy_loss_type {loss.policy_loss_type}": loss.is_anchored_on_sampler,
        "a mask based on importance ratios": loss.masks_by_ratio,
        f"tis_ratio_type {loss.tis_ratio_type}": loss.tis_ratio_type in ("token", "sequence"),
    }
    for name, needs in needing.items():
        if needs:
            got = f"no row has rollout_logprobs, which {name} needs"
            hint = "record log-probabilities when sampling, or change this setting"
            raise InputError("rollout_logprobs", config.data.dataset, got, hint=hint)
    return False


def check_dataset(
    run: Run, index: pl.DataFrame, plan: Plan, *, must_learn: bool
) -> tuple[bool, dict[str, Remark]]:
    """Check every row of a run's dataset, indexed by `trainer.batch.index_rows`.

    With `must_learn`, a dataset from which nothing can be learned is rejected.

    Returns:
        Whether importance weights and masks apply, and notes and warnings by subject.

    Raises:
        RolloutError: A row cannot be trained on as configured.
    """
    config, size, limit = run.config, run.vocab_size, run.limit
    rows = check_rows(index, plan, config, vocab_size=size, limit=limit, must_learn=must_learn)
    remarks = dict[str, Remark]()
    if num_greedy := num_greedy_rows(index, plan):
        text = (
            f"{count(num_greedy, 'row')} sampled at temperature 0 will be excluded from training:"
        )
        remarks["greedy"] = Remark(f"{text} greedy samples have no gradient", WARNING)
    if rows.is_empty():
        return config.loss.corrects_for_sampler, remarks
    # As stored: `run.rollouts` has the columns that `data.sampling_defaults` fills in.
    rollouts = rollout_io.scan(config.data.dataset)
    metadata = rollout_io.read_metadata(config.data.dataset)
    if "sampling_extra" not in rollouts.collect_schema():
        said = pl.lit(sampling_extra_of(metadata.made_by), pl.String)
        rows = rows.with_columns(pl.col("sampling_extra").fill_null(said))
    if unknown := check_sampling(rows, config):
        remarks["sampling"] = Remark(f"note: {unknown}")
    corrects = corrects_for_sampler(rows, config, metadata.logprobs_mode)
    if config.loss.corrects_for_sampler and not corrects:
        text = "note: importance correction (tis_ratio_type) is off, because the dataset has no"
        remarks["corrects"] = Remark(f"{text} rollout_logprobs")
    replaying = {config.model.path: run.whole_policy.model}  # the critic uses no recorded experts
    if isinstance(run.reference, Policy):
        replaying[config.loss.reference_model or config.model.path] = run.reference.model
    if routing := check_replay(rollouts, replaying, rows, replays=config.batch.replay_routing):
        remarks["routing"] = Remark(routing, WARNING)
    if most := config.batch.max_row_tokens:
        cut, lost, larger = cut_rows(rows, most, limit.num_tokens)
        remarks |= {"truncated_rows": Remark(f"note: {cut}")} if cut else {}
        remarks |= {"cut_rows": Remark(f"{lost}\nHint: {larger}", WARNING)} if lost else {}
    texts = warnings_before(rows, plan, config)
    return corrects, remarks | {name: Remark(text, WARNING) for name, text in texts.items()}


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
