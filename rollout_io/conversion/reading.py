"""Conversion of small logs to one table in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from rollout_io.conversion import rejections
from rollout_io.conversion.batch import Reader, errors_of, sound
from rollout_io.conversion.choices import Choices, refuse_misfits, settings_of
from rollout_io.conversion.inputs import PathLike, open_file, paths_of, refuse_changed, versions_of
from rollout_io.conversion.log import open_log
from rollout_io.conversion.plan import plan_logs, refuse_nothing
from rollout_io.conversion.remote import naming_errors
from rollout_io.conversion.rewards import read_rewards
from rollout_io.retokenize.local import tokenizer_directory


def read_log(inputs: PathLike | Sequence[PathLike], choices: Choices | None = None) -> pa.Table:
    """Convert logs to one rollout table, following the same rules as `convert`.

    Args:
        inputs: As for `convert`.
        choices: See `Choices`; an invalid record raises an error even if `on_error` is "skip".

    Raises:
        RolloutError: A record is invalid (the error describes the first one), or an argument is.

    Example:
        >>> read_log(["shop.calls.jsonl"], Choices(rewards="shop.rewards.jsonl")).num_rows
        205
    """
    choices = choices or Choices()
    if choices.tokenizer is not None:
        tokenizer_directory(choices.tokenizer)  # fails before any log is read
    with tempfile.TemporaryDirectory() as folder, naming_errors(Path(folder)):
        spool = Path(folder)
        ignored = [choices.rewards] if choices.rewards else []
        opened = open_log(paths_of(inputs), choices.format, spool, ignored, strict=choices.strict)
        logs = opened.logs
        refuse_misfits(choices, logs)
        rewards = open_file(choices.rewards, spool) if choices.rewards else None
        versions = versions_of([*opened.inputs, *([rewards] if rewards else [])])
        named = {} if rewards is None else read_rewards(*rewards)
        found = (log.find(lambda _num_bytes: None, spool) for log in logs)
        plans, outcomes = plan_logs(found, named, choices.group_by)
        refuse_nothing(plans, opened.inputs)
        rejected = [*opened.unused, *(r for planned in plans for r in planned.rejected)]
        tables = []
        each = settings_of(choices, logs, [planned.about for planned in plans], spool)
        for settings, planned in zip(each, plans, strict=True):
            reader = Reader(settings, outcomes, rejected)
            vocab_size = settings.metadata.vocab_size
            tables += [sound(part, rejected, vocab_size) for part in reader.parts(planned.runs)]
        refuse_changed(versions)
        if rejected:
            num_runs = sum(planned.num_runs for planned in plans)
            found_errors = errors_of(rejected, opened.inputs)
            rejections.fail(found_errors, num_runs, opened.noun, rewards and rewards.name)
    table = pa.concat_tables(tables, promote_options="permissive")
    return table.replace_schema_metadata(each[0].metadata.encode("full"))
