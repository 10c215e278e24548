"""The `trl` format: TRL's logs with `log_completions`, completions_{step}.parquet.

Columns: `step`, `prompt` and `completion` (lists of messages, or text), one numeric column per
reward function, user columns, `advantage`. A row is a run. Rows of one step with the same prompt
form a group, as the file does not record TRL's groups. Completions that are text were decoded
without special tokens. The history of the dataset records both facts. The file does not record the
weights of the reward functions either: if there is one numeric column, it is the outcome; if there
are several, `--reward` chooses one.

Tool arguments are a struct with all names used in the file; null arguments are dropped.

Export to TRL: Parquet with the fields that a `rollout_func` of its GRPO trainer returns.

`trl.trainer.grpo_trainer.GRPOTrainer._generate` (TRL 1.16.0) reads from a rollout function's
result:
- `prompt_ids`, `completion_ids`, `logprobs`: required, each a list of lists;
- `env_mask`: 1 where the completion token is trained on;
- any other key: passed to the reward functions under its name.

`group_id` and `model_version` are named as in `trl.experimental.async_grpo` (RolloutSample).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa

from rollout_io.dataset.opening import Version
from rollout_io.dataset.storage import PathLike
from rollout_io.formats.base import (
    About,
    Completion,
    Conversation,
    Found,
    Options,
    Place,
    Run,
    Trajectory,
)
from rollout_io.formats.engines.files import is_table, schema_of
from rollout_io.formats.engines.records import Open, Records
from rollout_io.formats.exporting import (
    Exported,
    Failed,
    Failures,
    Groups,
    ParquetFile,
    PictureBytes,
    Uniform,
    declared_tables,
    new_export,
    renamed,
    rewards_of,
)
from rollout_io.formats.grammar import inner
from rollout_io.formats.parsing.content import Message, raw_of
from rollout_io.formats.parsing.messages import MESSAGE, prompt_key, read_messages
from rollout_io.formats.parsing.records import numbers
from schemas.errors import InputError

_REQUIRED = frozenset({"step", "prompt", "completion"})
_ADVANTAGE = "advantage"
_TEXT = "decoded without special tokens: the ids of the completions are approximate"


class Row(Open):
    """A run; its other columns are numbers of rewards, and the user's."""

    step: Any = None
    prompt: Annotated[Any, inner(MESSAGE)] = None
    completion: Annotated[Any, inner(MESSAGE)] = None

    @property
    def is_text(self) -> bool:
        """True if the row has text, not messages."""
        return isinstance(self.prompt, str) and isinstance(self.completion, str)


def run_of(row: Row, place: Place) -> Run:
    """Return the run of a row."""
    prompt = row.prompt if row.is_text else _messages(row.prompt, f"{place.where}, prompt")
    key, step = prompt_key(prompt), str(row.step)
    labels = {"step": step, "prompt": key}
    instance = f"step-{step}/{key}"
    return Run(instance_id=instance, repetition_id=None, places=[place], labels=labels)


def read(row: Row, run: Run, _: Options) -> Trajectory:
    """Read the conversation or text of a row; all numbers of the row become metrics."""
    (place,) = run.places
    names = _numeric(place.path, Version.of(place.path))
    fields = {name: raw for name, raw in row.fields.items() if name in names}
    metrics = numbers(fields, place.where)
    rewards = names - {_ADVANTAGE}
    reward = metrics.get(next(iter(rewards))) if len(rewards) == 1 else None
    values = {"step": str(row.step)}
    step = _step(row, place.where)
    return Trajectory(steps=[step], reward=reward, metrics=metrics, user_values=values)


def _step(row: Row, where: str) -> Conversation | Completion:
    if row.is_text:
        prompt_text, response = str(row.prompt), str(row.completion)
        has_special = (True, False)
        return Completion(
            source=where, prompt=prompt_text, response=response, has_special=has_special
        )
    prompt = _messages(row.prompt, f"{where}, prompt")
    completion = _messages(row.completion, f"{where}, completion")
    return Conversation(source=where, messages=prompt + completion)


def _messages(value: Any, where: str) -> list[Message]:
    if not isinstance(value, list):
        finding = f"a value of type {type(value).__name__}"
        raise InputError("message", where, finding, "messages in both columns, or text in both")
    return read_messages(map(raw_of, value), where)


@lru_cache(maxsize=2)
def _numeric(path: Path, _: Version) -> set[str]:
    """Return the columns of numbers: the rewards, and the advantage."""
    return {field.name for field in schema_of(path) if _is_number(field.type)} - {"step"}


def _is_number(kind: pa.DataType) -> bool:
    is_whole = pa.types.is_integer(kind) or pa.types.is_boolean(kind)
    return bool(is_whole or pa.types.is_floating(kind))


def _has_text(path: Path) -> bool:
    kinds = [schema_of(path).field(name).type for name in ("prompt", "completion")]
    return all(pa.types.is_string(kind) or pa.types.is_large_string(kind) for kind in kinds)


def _finished(items: Iterator[Found]) -> Iterator[Found]:
    files = set[Path]()
    for item in items:
        if isinstance(item, Run):
            files.add(item.places[0].path)
        yield item
    if any(map(_has_text, files)):
        yield About("text", _TEXT)


ADAPTER = Records(
    records={"": Row},
    run=run_of,
    read=read,
    is_log=lambda start: is_table(start.path) and {*schema_of(start.path).names} >= _REQUIRED,
    columns=_REQUIRED,
    groups="inferred: rows of one step with the same prompt",
    finish=_finished,
).adapter("TRL's logged completions (completions_*.parquet): messages, or text without roles")


NAMES = {
    "prompt_token_ids": "prompt_ids",
    "response_ids": "completion_ids",
    "loss_mask": "env_mask",
    "rollout_logprobs": "logprobs",
    "policy_version": "model_version",
}


def write(dataset: PathLike, out: PathLike, failed: Failed = "group") -> Exported:
    """Stream the dataset, one row group at a time; the output has one row per sequence.

    The columns are `prompt_ids` and `completion_ids` (list<int32>), `env_mask` (list<int8>, the
    `loss_mask`), `logprobs` (list<float32> or null), `reward` (float64, unchanged), `group_id`
    (int64, instances numbered by first appearance), `model_version` (the `policy_version`), and all
    other columns under their original names. TRL aborts on a failed rollout and requires complete
    groups, so masked trajectories are left out.

    Raises:
        ValidationError: The dataset breaks an invariant.
        RolloutError: A reward is null; only some rows have log-probabilities; `out` exists; a user
            column has a name that the export uses.
    """
    uniform, done, groups = Uniform(dataset, ["rollout_logprobs"]), Exported(), Groups()
    with new_export(out, dataset) as path, ParquetFile(path) as file:
        failures, pictures = Failures.of(dataset, failed), PictureBytes(dataset)
        for piece in declared_tables(dataset):
            table = pictures.restored_in(failures.leave_out(piece, done))
            uniform.check(table)
            rewards_of(dataset, table)
            if "rollout_logprobs" not in table.column_names:
                nulls = pa.nulls(table.num_rows, pa.list_(pa.float32()))
                table = table.append_column("rollout_logprobs", nulls)
            numbers, _ = groups.add(table)
            file.write(renamed(table, NAMES, {"group_id": pa.array(numbers, pa.int64())}))
        done.close(dataset)
    if not uniform.has_values("rollout_logprobs"):
        done.remarks.append(
            "the dataset has no log-probabilities: return logprobs=None from the rollout function"
        )
    done.remarks += groups.remarks("TRL", "num_generations")
    return done
