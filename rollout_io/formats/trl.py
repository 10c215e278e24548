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

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from rollout_io.dataset.opening import Version, open_input
from rollout_io.formats.base import (
    About,
    Adapter,
    Completion,
    Conversation,
    Found,
    Input,
    Options,
    Place,
    Progress,
    Rejected,
    Run,
    Trajectory,
)
from rollout_io.formats.contents import account
from rollout_io.formats.exporting import (
    Exported,
    Failed,
    Failures,
    Groups,
    ParquetFile,
    PathLike,
    Uniform,
    declared_tables,
    new_export,
    renamed,
    rewards_of,
)
from rollout_io.formats.parsing.content import Message
from rollout_io.formats.parsing.documents import index_of
from rollout_io.formats.parsing.messages import MESSAGE, prompt_key, read_messages
from rollout_io.formats.picture_bytes import PictureBytes
from rollout_io.formats.start import Start
from schemas.errors import InputError, RolloutError

_REQUIRED = frozenset({"step", "prompt", "completion"})
_ADVANTAGE = "advantage"
_GROUPS = "inferred: rows of one step with the same prompt"
_TEXT = "decoded without special tokens: the ids of the completions are approximate"
_MAGIC = b"PAR1"
_ERRORS = (pa.ArrowException, OSError, ValueError, ArithmeticError, NotImplementedError)


def find_rows(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Yield one run per row, in the order of the files."""
    yield About("groups", _GROUPS)
    has_text = False
    for given in inputs:
        num_bytes = given.path.stat().st_size
        progress(num_bytes)
        try:
            rows = _heads(given.path)
        except _ERRORS as error:
            yield Rejected(Place(given.path, given.name, 0, num_bytes), _damaged(given.name, error))
            continue
        for i, row in enumerate(rows):
            place = Place(given.path, f"{given.name}, row {i}", None, num_bytes // len(rows), i)
            has_text |= _is_text(row)
            try:
                yield _run(place, row)
            except RolloutError as refused:
                yield Rejected(place, refused)
    if has_text:
        yield About("text", _TEXT)


def _heads(path: Path) -> list[dict[str, Any]]:
    """Return, for each row, the columns that identify it."""
    with pq.ParquetFile(path) as file:
        missing = sorted(_REQUIRED - set(file.schema_arrow.names))
        if missing:
            raise ValueError(f"the column {missing[0]!r} is missing")
        rows: list[dict[str, Any]] = file.read(sorted(_REQUIRED)).to_pylist()
    return rows


def _damaged(where: str, error: Exception) -> InputError:
    got = " ".join(f"cannot read the file: {str(error) or type(error).__name__}".split())
    return InputError("parquet_file", where, got, hint="copy the file again, or log it again")


def _run(place: Place, row: Mapping[str, Any]) -> Run:
    prompt = row["prompt"] if _is_text(row) else _messages(row, "prompt", place.where)
    key, step = prompt_key(prompt), str(row["step"])
    return Run(
        instance_id=f"step-{step}/{key}",
        repetition_id=None,
        places=[place],
        labels={"step": step, "prompt": key},
    )


def read_row(run: Run, _: Options) -> Trajectory:
    """Read the conversation or text of a row; all numbers of the row become metrics.

    Raises:
        InputError: `parquet_file`: the file is damaged; `message`: a message is invalid;
            `no_calls`: there is no assistant message.
    """
    (place,) = run.places
    try:
        table = _table(place.path, Version.of(place.path))
        row = table.slice(index_of(place), 1).to_pylist()[0]
    except _ERRORS as error:
        raise _damaged(place.where, error) from None
    fields = [field for field in table.schema if field.name != "step"]
    known = {field.name: row[field.name] for field in fields if _is_number(field.type)}
    metrics = {name: float(v) for name, v in known.items() if v is not None and not math.isnan(v)}
    rewards = known.keys() - {_ADVANTAGE}
    reward = metrics.get(next(iter(rewards))) if len(rewards) == 1 else None
    step = _said(row, place.where)
    return Trajectory(
        steps=[step], reward=reward, metrics=metrics, user_values={"step": str(row["step"])}
    )


def _said(row: Mapping[str, Any], where: str) -> Conversation | Completion:
    if _is_text(row):
        prompt, response = row["prompt"], row["completion"]
        return Completion(source=where, prompt=prompt, response=response, has_special=(True, False))
    messages = _messages(row, "prompt", where) + _messages(row, "completion", where)
    if all(message["role"] != "assistant" for message in messages):
        raise InputError("no_calls", where, "the completion has no assistant message")
    return Conversation(source=where, messages=messages)


def _is_text(row: Mapping[str, Any]) -> bool:
    return isinstance(row["prompt"], str) and isinstance(row["completion"], str)


def _messages(row: Mapping[str, Any], name: str, where: str) -> list[Message]:
    if not isinstance(row[name], list):
        got = f"a value of type {type(row[name]).__name__}"
        expected = "messages in both columns, or text in both"
        raise InputError("message", f"{where}, {name}", got, expected)
    account(MESSAGE, _shown(row[name]), name)
    raws = [msgspec.Raw(msgspec.json.encode(_shown(message))) for message in row[name]]
    return read_messages(raws, f"{where}, {name}")


@lru_cache(maxsize=2)
def _table(path: Path, _: Version) -> pa.Table:
    """Read an entire file, which fits in memory: it has only the completions of one step."""
    with pq.ParquetFile(path) as file:
        return file.read()


def _is_number(kind: pa.DataType) -> bool:
    is_whole = pa.types.is_integer(kind) or pa.types.is_boolean(kind)
    return bool(is_whole or pa.types.is_floating(kind))


def _shown(value: Any) -> Any:
    """Drop the nulls that Arrow adds to structs."""
    if isinstance(value, list):
        return [_shown(element) for element in value]
    if isinstance(value, dict):
        return {name: _shown(v) for name, v in value.items() if v is not None}
    return value


def recognizes(start: Start) -> bool:
    """True if a file is Parquet with TRL's columns."""
    path = start.path
    try:
        if not start.is_file:
            return False
        with open_input(path) as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                return False
        return set(pq.read_schema(path).names) >= _REQUIRED
    except _ERRORS:
        return False


ADAPTER = Adapter(
    summary="TRL's logged completions (completions_*.parquet): messages, or text without roles",
    recognizes=recognizes,
    find=find_rows,
    read=read_row,
    is_text=True,
)


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
