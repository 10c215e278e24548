r"""The `trl` and `verl` formats: what these trainers log, which is text, and what they take of a dataset.

TRL with `log_completions` writes completions_{step}.parquet, with the columns `step`, `prompt` and
`completion` (lists of messages, or text), one numeric column per reward function, user columns, and
`advantage`. A row is a run. Rows of one step with the same prompt form a group, as the file does not
record TRL's groups. Completions that are text were decoded without special tokens. The history of the
dataset records both facts. The file does not record the weights of the reward functions either: if there
is one numeric column, it is the outcome; if there are several, `--reward` chooses one. Tool arguments are
a struct with all names used in the file; null arguments are dropped.

verl dumps rollouts and validation as {step}.jsonl:

    {"input": "user\nWhat is 1 + 5?\nassistant\n", "output": "6", "gts": "6", "score": 1.0, "step": 1}

A line is a run. `input` and `output` were decoded without special tokens. The separators of
messages are therefore lost, and neither roles nor exact tokens can be recovered; the history of the
dataset records that. The whole `output` trains, also the tool results in it; runs with these are
counted. `rollout_io.hooks.verl` keeps exact tokens and masks instead. Lines of one file and step with the
same `input` form a group, as the file does not record verl's groups; `task_instance_id` names the input
across steps, for `rollouts diff`. The outcome is `score`; all other numbers (`reward_extra_info`) are
metrics.

Export to TRL: Parquet with the fields that a `rollout_func` of its GRPO trainer returns.
`trl.trainer.grpo_trainer.GRPOTrainer._generate` (TRL 1.16.0) reads from a rollout function's result:

- `prompt_ids`, `completion_ids`, `logprobs`: required, each a list of lists;
- `env_mask`: 1 where the completion token is trained on;
- any other key: passed to the reward functions under its name.

`group_id` and `model_version` are named as in `trl.experimental.async_grpo` (RolloutSample).

Export to verl: agent-loop outputs, unpadded, in Parquet.

`verl.experimental.agent_loop.agent_loop.AgentLoopOutput.as_dict` (verl 0.9.1) defines these fields,
and `verl.trainer.ppo.v1.agent_loop_tq` adds `uid`, `session_id` and the index of an output in its
session:

- `prompts`, `responses`, `response_mask` (1 where the token is trained on), `rollout_log_probs`;
- `rm_scores`: a reward per response token, the trainer's `token_level_scores`;
- `routed_experts`: for all tokens of prompt + response; zeros where the engine recorded none;
- `min_global_steps`: version of the weights that sampled the response;
- `multi_modal_data`: `images`, the pictures of prompt + response, in order, as {bytes, path}. verl holds
  decoded pictures there, and makes `multi_modal_inputs` of them (`process_image` in
  https://github.com/verl-project/verl/blob/v0.9.1/verl/utils/dataset/vision_utils.py takes both).

`verl.utils.tensordict_utils.list_of_dict_to_tensordict` accepts rows once these fields are
converted to tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

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
    note_run,
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
from rollout_io.formats.parsing.content import NO_JSON, Message, filled, raw_of
from rollout_io.formats.parsing.messages import MESSAGE, prompt_key, read_messages
from rollout_io.formats.parsing.records import label, numbers, with_files_apart
from schemas.columns import PICTURES
from schemas.errors import InputError
from schemas.ragged import Ragged, list_lengths, offsets_of, ranges

_REQUIRED = frozenset({"step", "prompt", "completion"})
_ADVANTAGE = "advantage"
_TRL_TEXT = "decoded without special tokens: the ids of the completions are approximate"


class Row(Open):
    """A run; its other columns are numbers of rewards, and the user's."""

    step: Any = None
    prompt: Annotated[Any, inner(MESSAGE)] = None
    completion: Annotated[Any, inner(MESSAGE)] = None

    @property
    def is_text(self) -> bool:
        """True if the row has text, not messages."""
        return isinstance(self.prompt, str) and isinstance(self.completion, str)


def _run_of_row(row: Row, place: Place) -> Run:
    prompt = row.prompt if row.is_text else _messages(row.prompt, f"{place.where}, prompt")
    return _run_of(prompt, row.step, place)


def _run_of(prompt: str | list[Message], step: object, place: Place) -> Run:
    key = prompt_key(prompt)
    labels = {"step": str(step), "prompt": key}
    return Run(instance_id=f"step-{step}/{key}", repetition_id=None, places=[place], labels=labels)


def _read_row(row: Row, run: Run, _: Options) -> Trajectory:
    """Read the conversation or text of a row; all numbers of the row become metrics."""
    (place,) = run.places
    names = _numeric(place.path, Version.of(place.path))
    fields = {name: raw for name, raw in row.fields.items() if name in names}
    metrics = numbers(fields, place.where)
    rewards = names - {_ADVANTAGE}
    reward = metrics.get(next(iter(rewards))) if len(rewards) == 1 else None
    step: Conversation | Completion
    if row.is_text:
        step = Completion(
            source=place.where,
            prompt=row.prompt,
            response=row.completion,
            has_special=(True, False),
        )
    else:
        messages = _messages(row.prompt, f"{place.where}, prompt")
        messages += _messages(row.completion, f"{place.where}, completion")
        step = Conversation(source=place.where, messages=messages)
    values = {"step": str(row.step)}
    return Trajectory(steps=[step], reward=reward, metrics=metrics, user_values=values)


def _messages(value: Any, where: str) -> list[Message]:
    if not isinstance(value, list):
        finding = f"a value of type {type(value).__name__}"
        raise InputError("message", where, finding, "messages in both columns, or text in both")
    return read_messages(map(raw_of, value), where)


@lru_cache(maxsize=2)
def _numeric(path: Path, _: Version) -> set[str]:
    """Return the columns of numbers: the rewards, and the advantage."""
    kinds = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_floating)
    columns = [f.name for f in schema_of(path) if any(is_kind(f.type) for is_kind in kinds)]
    return {*columns} - {"step"}


def _has_text(path: Path) -> bool:
    kinds = [schema_of(path).field(name).type for name in ("prompt", "completion")]
    return all(pa.types.is_string(kind) or pa.types.is_large_string(kind) for kind in kinds)


def _told(items: Iterator[Found]) -> Iterator[Found]:
    files = set[Path]()
    for item in items:
        if isinstance(item, Run):
            files.add(item.places[0].path)
        yield item
    if any(map(_has_text, files)):
        yield About("text", _TRL_TEXT)


TRL = Records(
    records={"": Row},
    run=_run_of_row,
    read=_read_row,
    is_log=lambda start: is_table(start.path) and {*schema_of(start.path).names} >= _REQUIRED,
    columns=_REQUIRED,
    groups="inferred: rows of one step with the same prompt",
    finish=_told,
).adapter("TRL's logged completions (completions_*.parquet): messages, or text without roles")


_VERL_TEXT = "decoded without special tokens: the ids are approximate"
NO_IDS = (
    "runs without token ids, log-probabilities and loss mask, which verl's dumps lack"
    " (a hook in verl keeps them: docs/guides/keep_rollouts.md)"
)
TOOL_RESULTS = (
    "runs with what looks like tool results, which train as if the model had sampled them"
)
_LATER_TURN = re.compile(
    r"<tool_response>|^(?:user|tool|ipython|observation)$|(?:user|tool|ipython)\n\n.*assistant\n\n",
    re.MULTILINE | re.DOTALL,
)
"""Remains of a header between two turns, whose special tokens are not in the text."""
_NO_METRICS = frozenset({"step", "gts", "request_id"})


class Sample(Open):
    """A run; its other fields are numbers of the reward."""

    input: str
    output: str
    score: float
    step: int
    gts: msgspec.Raw = NO_JSON
    request_id: msgspec.Raw = NO_JSON


def _read_sample(sample: Sample, run: Run, _: Options) -> Trajectory:
    """Read the text of a line; all numbers of the line become metrics."""
    (place,) = run.places
    note_run(NO_IDS)
    if _LATER_TURN.search(sample.output):
        note_run(TOOL_RESULTS)
    step = Completion(
        source=place.where,
        prompt=sample.input,
        response=sample.output,
        has_special=(False, False),
    )
    fields = {name: raw for name, raw in sample.fields.items() if name not in _NO_METRICS}
    return Trajectory(
        steps=[step],
        reward=sample.score,
        metrics=numbers(fields, place.where),
        user_values=filled(
            step=str(sample.step),
            task_instance_id=prompt_key(sample.input),  # the same in the dumps of other steps
            gts=label(sample.gts, place.where),
            request_id=label(sample.request_id, place.where),
        ),
    )


VERL = Records(
    records={"": Sample},
    run=lambda sample, place: _run_of(sample.input, sample.step, place),
    read=_read_sample,
    groups="inferred: lines of one file and step with the same input",
    finish=partial(with_files_apart, text=_VERL_TEXT),
).adapter("verl's dumps ({step}.jsonl): decoded text without roles")


_TRL_NAMES = {
    "prompt_token_ids": "prompt_ids",
    "response_ids": "completion_ids",
    "loss_mask": "env_mask",
    "rollout_logprobs": "logprobs",
    "policy_version": "model_version",
}
_LOGPROBS, _ROUTES = "rollout_logprobs", "rollout_expert_indices"
_Converted = Callable[[pa.Table, pa.Table, PictureBytes], pa.Table]


def _streamed(
    dataset: PathLike, out: PathLike, failed: Failed, uniform: Uniform, converted: _Converted
) -> Exported:
    """Write what is not masked, one row group at a time; `converted` is given it with and without pictures."""
    done = Exported()
    with new_export(out, dataset) as path, ParquetFile(path) as file:
        failures, pictures = Failures.of(dataset, failed), PictureBytes(dataset)
        for piece in declared_tables(dataset):
            stored = failures.leave_out(piece, done)
            table = pictures.restored_in(stored)
            uniform.check(table)
            file.write(converted(table, stored, pictures))
        done.close(dataset)
    return done


def write_trl(dataset: PathLike, out: PathLike, failed: Failed = "group") -> Exported:
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
    uniform, groups = Uniform(dataset, [_LOGPROBS]), Groups()

    def converted(table: pa.Table, _: pa.Table, __: PictureBytes) -> pa.Table:
        rewards_of(dataset, table)
        if _LOGPROBS not in table.column_names:
            nulls = pa.nulls(table.num_rows, pa.list_(pa.float32()))
            table = table.append_column(_LOGPROBS, nulls)
        numbers, _ = groups.add(table)
        return renamed(table, _TRL_NAMES, {"group_id": pa.array(numbers, pa.int64())})

    done = _streamed(dataset, out, failed, uniform, converted)
    if not uniform.has_values(_LOGPROBS):
        done.remarks.append(
            "the dataset has no log-probabilities: return logprobs=None from the rollout function"
        )
    done.remarks += groups.remarks("TRL", "num_generations")
    return done


_VERL_NAMES = {
    "instance_id": "uid",
    "repetition_id": "session_id",
    "step_index": "index",
    "prompt_token_ids": "prompts",
    "response_ids": "responses",
    "loss_mask": "response_mask",
    "rollout_logprobs": "rollout_log_probs",
    "reward": "reward_score",
    "policy_version": "min_global_steps",
}


def write_verl(dataset: PathLike, out: PathLike, failed: Failed = "group") -> Exported:
    """Stream the dataset, one row group at a time; the output has one row per sequence.

    `rm_scores` (list<float32>) contains the `rewards` or, without these, zeros and the `reward` at
    the last token; `reward_score` (float64) is the reward. Columns without a verl field keep their
    names. verl drops the group of a failed session, so masked trajectories are left out.

    Raises:
        ValidationError: The dataset breaks an invariant.
        RolloutError: A reward is null; only some rows have log-probabilities or routing; `out`
            exists; a user column has a name that the export uses.

    Example:
        A row with response ids [7, 8, 9], reward 0.5 and no `rewards` has rm_scores [0, 0, 0.5].
    """

    def converted(table: pa.Table, stored: pa.Table, pictures: PictureBytes) -> pa.Table:
        added = {"rm_scores": _scores(table, rewards_of(dataset, table))}
        if PICTURES in stored.column_names:
            images = pictures.images_in(stored)
            added["multi_modal_data"] = pa.StructArray.from_arrays([images], ["images"])
        if _ROUTES in table.column_names:
            added["routed_experts"] = _routes(table)
        table = table.drop_columns([n for n in ("rewards", _ROUTES) if n in table.column_names])
        return renamed(table, _VERL_NAMES, added)

    return _streamed(dataset, out, failed, Uniform(dataset, [_LOGPROBS, _ROUTES]), converted)


def _scores(table: pa.Table, rewards: list[float]) -> pa.Array:
    """Return the scores of each row, [tokens]: `rewards`, or zeros and `reward` at the end."""
    responses = Ragged.from_arrow(table.column("response_ids"))
    scores = np.zeros(responses.offsets[-1])
    scores[responses.offsets[1:] - 1] = rewards
    if "rewards" in table.column_names:
        placed = Ragged.from_arrow(table.column("rewards"))
        scores[ranges(responses.offsets[:-1], placed.lengths)] = placed.values
    return Ragged(scores.astype(np.float32), responses.offsets, responses.valid).to_arrow(
        pa.float32()
    )


def _routes(table: pa.Table) -> pa.Array:
    """Return the routing of each row, [prompt + response, layers, topk], padded with zeros."""
    column = table.column(_ROUTES)
    kind = column.type
    lengths = list_lengths(column)
    shape = (kind.value_type.list_size, kind.value_type.value_type.list_size)
    flat = pc.list_flatten(pc.list_flatten(pc.list_flatten(column)))
    prompts, responses = (
        Ragged.from_arrow(table.column(n)) for n in ("prompt_token_ids", "response_ids")
    )
    offsets = offsets_of(prompts.lengths + responses.lengths)
    routes = np.zeros((int(offsets[-1]), *shape), np.int16)
    routes[ranges(offsets[:-1], lengths)] = np.asarray(flat).reshape(-1, *shape)
    values = pa.array(routes.reshape(-1))
    for size in reversed(shape):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, type=kind)
