"""The `skyrl_evals` format: evaluations that SkyRL dumps beside its checkpoints.

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

import re
from collections.abc import Iterator

import msgspec

from rollout_io.formats.base import About, Completion, Found, Input, Options, Place, Run, Trajectory
from rollout_io.formats.engines.records import Records, is_object_with
from rollout_io.formats.parsing.content import NO_JSON, filled
from rollout_io.formats.parsing.lines import logs_below
from rollout_io.formats.parsing.messages import prompt_key
from rollout_io.formats.parsing.naming import with_files_apart
from rollout_io.formats.start import Start
from schemas.errors import InputError

AGGREGATED = "aggregated_results.jsonl"
_GROUPS = "inferred: lines of one evaluation and data source with the same prompt"
_TEXT = "decoded with special tokens: the ids are approximate"
_HINT = "convert SkyRL's GeneratorOutput, which has the ids, with rollout_io.from_generator_output"
_BATCH = b"TrainingInputBatch"
_FAILED = "error"
_EVALUATION = re.compile(r"global_step_(\d+)_evals")


class Sample(msgspec.Struct, gc=False):
    """A run."""

    input_prompt: str
    output_response: str
    env_class: str | None
    score: float | list[float] | None = None
    stop_reason: str | None = None
    env_extras: msgspec.Raw = NO_JSON
    data_source: str | None = None


def run_of(sample: Sample, place: Place) -> Run:
    """Return the run of a line."""
    evaluation = _EVALUATION.search(place.where)
    prompt = prompt_key(sample.input_prompt)
    labels = filled(
        step=evaluation[1] if evaluation else None, data_source=sample.data_source, prompt=prompt
    )
    step = f"step-{labels['step']}/" if "step" in labels else ""
    instance = f"{step}{sample.data_source or 'unknown'}/{prompt}"
    return Run(instance_id=instance, repetition_id=None, places=[place], labels=labels)


def read(sample: Sample, run: Run, _: Options) -> Trajectory:
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


def _finished(items: Iterator[Found]) -> Iterator[Found]:
    yield About("text", _TEXT)
    yield from with_files_apart(items)


def _files(log: Input) -> list[Input]:
    """Return the evaluations of a directory, without `aggregated_results.jsonl`."""
    if _is_pickle(Start(log.path)):
        finding = (
            "the file is a pickled TrainingInputBatch, which could run code, so it is not loaded"
        )
        raise InputError("pickle", log.name, finding, hint=_HINT)
    if not log.path.is_dir():
        return [log]
    paths = logs_below(log.path, _is_evaluation, AGGREGATED.__eq__)
    paths = paths if all(path.parent == log.path for path in paths) else []
    return [Input(f"{log.name}/{path.name}", path) for path in paths]


def _is_evaluation(name: str) -> bool:
    return name.endswith(".jsonl") and name != AGGREGATED


def _is_pickle(start: Start) -> bool:
    return start.head.startswith(b"\x80") and _BATCH in start.head


_is_sample = is_object_with(["input_prompt", "output_response", "env_class"])

ADAPTER = Records(
    records={"": Sample},
    run=run_of,
    read=read,
    is_log=lambda start: _is_pickle(start) or any(map(_is_sample, start.values)),
    files=_files,
    groups=_GROUPS,
    finish=_finished,
).adapter("SkyRL's dumped evaluations: decoded text without roles (pickles are rejected)")
