"""The `skyrl` and `skyrl_evals` formats: GeneratorOutputs as JSON, and dumped evaluations; export to the first.

A GeneratorOutput is one JSON object, as `rollouts export` writes it. Its fields become columns of the
rollout table (see `from_generator_output`), except `rollout_metrics`, which concern the entire output:
they are added to the history of the dataset (`made_by`). The fields are those of
`skyrl.train.generators.base.GeneratorOutput` (`skyrl_fields`).

SkyRL dumps evaluations beside its checkpoints:

    dumped_evals/global_step_N_evals/<data source>.jsonl
        {"input_prompt": "...", "output_response": "...", "score": 1.0, "stop_reason": "stop",
         "env_class": "gsm8k", "env_extras": {...}, "data_source": "openai/gsm8k"}
    dumped_evals/global_step_N_evals/aggregated_results.jsonl   aggregated metrics, no rollouts
    dumped_data/global_step_N_training_input.pkl   rejected: loading a pickle runs its code

A line of an evaluation is a run: text decoded with special tokens. Lines of one evaluation and data
source with the same prompt form a group, as the file does not record groups. The directory of an
evaluation is one log.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from rollout_io.dataset.opening import open_input
from rollout_io.dataset.storage import PathLike
from rollout_io.formats.base import (
    About,
    Adapter,
    Completion,
    Found,
    Input,
    Options,
    Place,
    Progress,
    Rejected,
    Run,
    Trajectory,
)
from rollout_io.formats.engines.files import Start
from rollout_io.formats.engines.records import Records
from rollout_io.formats.exporting import (
    FAILED,
    IN_FAILED_GROUP,
    Exported,
    Failed,
    Failures,
    new_export,
)
from rollout_io.formats.grammar import like
from rollout_io.formats.parsing.content import NO_JSON, filled
from rollout_io.formats.parsing.jsonl import read_document
from rollout_io.formats.parsing.messages import prompt_key
from rollout_io.formats.parsing.records import logs_below, with_files_apart
from rollout_io.formats.skyrl_fields import OPTIONAL, REQUIRED, USER_FIELDS
from rollout_io.formats.skyrl_generator_output import (
    COLUMN,
    generator_output_text,
    read_rows,
    support_arrays,
)
from rollout_io.formats.skyrl_output_columns import METRICS_KEY
from schemas.errors import ConfigError, InputError, RolloutError, count

METRICS = "rollout_metrics"
_FIELDS = {name.encode() for name in (*REQUIRED, *OPTIONAL, METRICS)}
_FIRST_KEY = re.compile(rb'\s*\{\s*"([a-z_]+)"\s*:')


class _Metrics(msgspec.Struct, gc=False):
    rollout_metrics: Any = None


_METRICS_DECODER = msgspec.json.Decoder(_Metrics)


def recognizes(start: Start) -> bool:
    """True if a file begins like a GeneratorOutput and contains its required fields.

    The file is searched but not parsed, so this is fast even for gigabytes.
    """
    path = start.path
    try:
        if not start.is_file:
            return False
        with open_input(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            first = _FIRST_KEY.match(text)
            is_field = first is not None and first[1] in _FIELDS
            del first  # the match references the map, which could not be closed otherwise
            return is_field and all(text.find(f'"{name}"'.encode()) >= 0 for name in REQUIRED)
    except (OSError, ValueError):  # ValueError: an empty file cannot be mapped
        return False


def find_outputs(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Yield one run per file; it covers all trajectories in the file."""
    metrics: dict[str, Any] = {}
    runs: list[Found] = []
    for log in inputs:
        num_bytes = log.path.stat().st_size
        place = Place(log.path, log.name, 0, num_bytes)
        progress(num_bytes)
        try:
            rollout_metrics = read_document(_METRICS_DECODER, log.path)[0].rollout_metrics
        except RolloutError as error:
            runs.append(Rejected(place, error))
            continue
        if rollout_metrics is not None:
            metrics[log.name] = rollout_metrics
        runs.append(Run(instance_id=log.name, repetition_id=0, places=[place]))
    if metrics:
        yield About(METRICS, metrics)
    yield from runs


def read_output(run: Run, options: Options) -> pa.Table:
    """Read the rows of a file, in order; `source` is the file and the row.

    A placeholder row becomes a trajectory with an `error` and a null reward.
    """
    (place,) = run.places
    if options.reward is not None:
        finding = "--reward does not apply: the log has one reward per row"
        raise ConfigError("reward_key", place.where, finding, hint="remove --reward")
    try:
        table = read_rows(place.path, place.where, options.group_size, options.other_fields)
    except RolloutError as error:
        here = error.where == str(place.path)
        where = place.where if here else f"{place.where}, {error.where}"
        raise error.at(where, error.hint or "") from None
    return table.replace_schema_metadata(None)


ADAPTER = Adapter(
    summary="SkyRL's GeneratorOutput as JSON, one object per file (as `rollouts export` writes it)",
    recognizes=recognizes,
    find=find_outputs,
    read=read_output,
    is_table=True,
)


HELD = {
    *("instance_id", "repetition_id", "trajectory_id", "step_index", "is_last_step", "error"),
    *("prompt_token_ids", "response_ids", "loss_mask", "rollout_logprobs", "reward", "rewards"),
    *("stop_reason", "rollout_expert_indices", "metrics", "segments", "token_source", COLUMN),
    *USER_FIELDS,
}


def write(dataset: PathLike, out: PathLike, failed: Failed = "group") -> Exported:
    """Write the dataset as a GeneratorOutput; see `to_generator_output` for rewards and failures.

    Rewards depend on the `outcome` in the dataset's metadata.

    The entire table is held in memory, because the output is one document. A masked trajectory
    becomes one placeholder row, at the position of its last row. `rollout_metrics` of a converted
    GeneratorOutput are restored if the dataset was converted from that one file, and at most merged or
    unmerged.

    Raises:
        RolloutError: `out_is_free`: `out` exists; or any error of `to_generator_output`.
    """
    from rollout_io.dataset.reader import read, read_metadata

    with new_export(out, dataset) as path:
        table, failures = read(dataset), Failures.of(dataset, failed)
        outcome = read_metadata(dataset).outcome or "last"
        text = generator_output_text(_with_metrics(table, dataset), out, failed, outcome)
        path.write_text(text, encoding="utf-8")
    masked, last = failures.masked(table), np.asarray(table.column("is_last_step"))
    done = Exported(num_rows_read=table.num_rows)
    done.num_rows_written = int((~masked | last).sum())
    done.leave_out(FAILED, int((failures.failed(table) & ~last).sum()))
    done.leave_out(IN_FAILED_GROUP, int((masked & ~failures.failed(table) & ~last).sum()))
    if masked.any():
        num = int((masked & last).sum())
        done.remarks.append(f"{count(num, 'placeholder')} written for masked trajectories")
    others = [name for name in table.column_names if name not in HELD]
    if others:
        names = ", ".join(others)
        done.remarks.append(f"not exported, because GeneratorOutput has no field for them: {names}")
    if COLUMN in table.column_names and support_arrays(table, masked) is None:
        num = table.column(COLUMN).filter(pa.array(~masked)).null_count
        lack = f"{count(num, 'row')} {'is' if num == 1 else 'are'} without it"
        done.remarks.append(f"{COLUMN} not exported, because {lack}")
    return done.close(dataset)


def _with_metrics(table: pa.Table, dataset: PathLike) -> pa.Table:
    from rollout_io.dataset.reader import read_metadata

    history = read_metadata(dataset).made_by
    is_same = all(step["verb"] in {"merge", "unmerge"} for step in history[1:])
    by_file = history[0].get(METRICS) if history and is_same else None
    if not isinstance(by_file, dict) or len(by_file) != 1 or len(history[0]["inputs"]) != 1:
        return table
    (metrics,) = by_file.values()
    return table.replace_schema_metadata({METRICS_KEY: json.dumps(metrics)})


_AGGREGATED = "aggregated_results.jsonl"
_GROUPS = "inferred: lines of one evaluation and data source with the same prompt"
_TEXT = "decoded with special tokens: the ids are approximate"
_HINT = "convert SkyRL's GeneratorOutput, which has the ids, with rollout_io.from_generator_output"
_BATCH = b"TrainingInputBatch"
_FAILED = "error"
_EVALUATION = re.compile(r"global_step_(\d+)_evals")


class _Sample(msgspec.Struct, gc=False):
    """A run."""

    input_prompt: str
    output_response: str
    env_class: str | None
    score: float | list[float] | None = None
    stop_reason: str | None = None
    env_extras: msgspec.Raw = NO_JSON
    data_source: str | None = None


def _run_of(sample: _Sample, place: Place) -> Run:
    """Return the run of a line."""
    evaluation = _EVALUATION.search(place.where)
    prompt = prompt_key(sample.input_prompt)
    labels = filled(
        step=evaluation[1] if evaluation else None, data_source=sample.data_source, prompt=prompt
    )
    step = f"step-{labels['step']}/" if "step" in labels else ""
    instance = f"{step}{sample.data_source or 'unknown'}/{prompt}"
    return Run(instance_id=instance, repetition_id=None, places=[place], labels=labels)


def _read_sample(sample: _Sample, run: Run, _: Options) -> Trajectory:
    """Read the text of a line.

    The outcome is `score`, or its sum if it is a list (one number per token). A run with the stop
    reason `error` has failed: SkyRL replaced its text with a placeholder.
    """
    is_failed = sample.stop_reason == _FAILED
    step = Completion(
        source=run.places[0].where,
        prompt=sample.input_prompt,
        response=sample.output_response,
        stop_reason=sample.stop_reason,
    )
    extras = bytes(sample.env_extras).decode()
    metrics = _metrics(sample.score)
    return Trajectory(
        steps=[] if is_failed else [step],
        reward=metrics.get("score"),
        error=_FAILED if is_failed else None,
        metrics=metrics,
        user_values=filled(
            env_class=sample.env_class,
            env_extras=None if extras in {"null", "{}"} else extras,
            data_source=sample.data_source,
            step=run.labels.get("step"),
        ),
    )


def _metrics(score: float | list[float] | None) -> dict[str, float]:
    """Return the score; if it has one number per token, return their sum and count."""
    if isinstance(score, list):
        return {"score": sum(score), "num_response_tokens": float(len(score))} if score else {}
    return {} if score is None else {"score": score}


def _files(log: Input) -> list[Input]:
    """Return the evaluations of a directory, without `aggregated_results.jsonl`."""
    if _is_pickle(Start(log.path)):
        finding = (
            "the file is a pickled TrainingInputBatch, which could run code, so it is not loaded"
        )
        raise InputError("pickle", log.name, finding, hint=_HINT)
    if not log.path.is_dir():
        return [log]
    paths = logs_below(
        log.path, lambda name: name.endswith(".jsonl") and name != _AGGREGATED, _AGGREGATED.__eq__
    )
    paths = paths if all(path.parent == log.path for path in paths) else []
    return [Input(f"{log.name}/{path.name}", path) for path in paths]


def _is_pickle(start: Start) -> bool:
    return start.head.startswith(b"\x80") and _BATCH in start.head


_is_sample = like("input_prompt output_response env_class")

EVALUATIONS = Records(
    records={"": _Sample},
    run=_run_of,
    read=_read_sample,
    is_log=lambda start: _is_pickle(start) or any(map(_is_sample, start.values)),
    files=_files,
    groups=_GROUPS,
    finish=partial(with_files_apart, text=_TEXT),
).adapter("SkyRL's dumped evaluations: decoded text without roles (pickles are rejected)")
