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
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from rollout_io.dataset.opening import open_input
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
from rollout_io.formats.contents import Contents, account
from rollout_io.formats.parsing.content import NO_JSON
from rollout_io.formats.parsing.documents import decode_record, logs_below
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.lines import Record, find_lines, read_record
from rollout_io.formats.parsing.messages import prompt_key
from rollout_io.formats.parsing.naming import FilesApart
from rollout_io.formats.start import Start
from schemas.errors import InputError, RolloutError

AGGREGATED = "aggregated_results.jsonl"
_GROUPS = "inferred: lines of one evaluation and data source with the same prompt"
_TEXT = "decoded with special tokens: the ids are approximate"
_HINT = "convert SkyRL's GeneratorOutput, which has the ids, with rollout_io.from_generator_output"
_BATCH = b"TrainingInputBatch"
_HEAD_BYTES = 1 << 12
_FAILED = "error"
_EVALUATION = re.compile(r"global_step_(\d+)_evals")


CONTENTS = Contents(
    reads={"": "input_prompt output_response env_class score stop_reason data_source env_extras"},
)


class _Sample(msgspec.Struct, gc=False):
    input_prompt: str
    output_response: str
    env_class: str | None
    score: float | list[float] | None = None
    stop_reason: str | None = None
    env_extras: msgspec.Raw = NO_JSON
    data_source: str | None = None


_DECODER = msgspec.json.Decoder(_Sample)


def find_dumps(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Yield one run per line; in a directory, `aggregated_results.jsonl` is skipped."""
    yield About("groups", _GROUPS)
    yield About("text", _TEXT)
    apart = FilesApart()
    for given in inputs:
        if _is_pickle(given.path):
            yield _refused_pickle(given, progress)
        else:
            evals = _evals(given) if given.path.is_dir() else [given]
            yield from find_lines(evals, progress, lambda record: _run(record, apart))


def _evals(given: Input) -> list[Input]:
    found = logs_below(given.path, _is_evaluation, AGGREGATED.__eq__)
    found = found if all(path.parent == given.path for path in found) else []
    return [Input(f"{given.name}/{path.name}", path) for path in found]


def _is_evaluation(name: str) -> bool:
    return name.endswith(".jsonl") and name != AGGREGATED


def _run(record: Record, apart: FilesApart) -> Run:
    place = record.place
    sample = decode_line(_DECODER, record.content, place.where)
    evaluation = _EVALUATION.search(place.where)
    found = {
        "step": evaluation and evaluation[1],
        "data_source": sample.data_source,
        "prompt": prompt_key(sample.input_prompt),
    }
    labels = {name: value for name, value in found.items() if value}
    step = f"step-{labels['step']}/" if "step" in labels else ""
    file = apart.name(f"{step}{sample.data_source or 'unknown'}", place.path)
    return Run(
        instance_id=f"{file}/{labels['prompt']}",
        repetition_id=None,
        places=[place],
        labels=labels,
    )


def _refused_pickle(given: Input, progress: Progress) -> Rejected:
    num_bytes = given.path.stat().st_size
    progress(num_bytes)
    got = "the file is a pickled TrainingInputBatch, which could run code, so it is not loaded"
    error = InputError("pickle", given.name, got, hint=_HINT)
    return Rejected(Place(given.path, given.name, 0, num_bytes), error)


def read_sample(run: Run, _: Options) -> Trajectory:
    """Read the text of a line.

    The outcome is `score`, or its sum if it is a list (one number per token). A run with the stop
    reason `error` has failed: SkyRL replaced its text with a placeholder.

    Raises:
        InputError: `record_type`: a field has the wrong type.
    """
    (place,) = run.places
    sample = decode_record(_DECODER, place)
    account(CONTENTS, read_record(place))
    is_failed = sample.stop_reason == _FAILED
    step = Completion(
        source=place.where,
        prompt=sample.input_prompt,
        response=sample.output_response,
        stop_reason=sample.stop_reason,
    )
    extras = bytes(sample.env_extras).decode()
    texts = {
        "env_class": sample.env_class,
        "env_extras": None if extras in {"null", "{}"} else extras,
        "data_source": sample.data_source,
        "step": run.labels.get("step"),
    }
    metrics = _metrics(sample.score)
    return Trajectory(
        steps=[] if is_failed else [step],
        reward=metrics.get("score"),
        error=_FAILED if is_failed else None,
        metrics=metrics,
        user_values={name: text for name, text in texts.items() if text},
    )


def _metrics(score: float | list[float] | None) -> dict[str, float]:
    """Return the score; if it has one number per token, return their sum and count."""
    if isinstance(score, list):
        return {"score": sum(score), "num_response_tokens": float(len(score))} if score else {}
    return {} if score is None else {"score": score}


def _is_pickle(path: Path) -> bool:
    try:
        if not path.is_file():
            return False
        with open_input(path) as file:
            head = file.read(_HEAD_BYTES)
    except (OSError, RolloutError):
        return False
    return head.startswith(b"\x80") and _BATCH in head


def recognizes(start: Start) -> bool:
    """True for a file of evaluation lines, a pickled batch, or a directory of evaluations."""
    path = start.path
    try:
        if path.is_dir():
            evals = _evals(Input("", path))
            return bool(evals) and all(Start(e.path).has_record(_DECODER) for e in evals)
    except OSError:
        return False
    return _is_pickle(path) or start.has_record(_DECODER)


ADAPTER = Adapter(
    summary="SkyRL's dumped evaluations: decoded text without roles (pickles are rejected)",
    recognizes=recognizes,
    find=find_dumps,
    read=read_sample,
    is_text=True,
    contents=CONTENTS,
    line=_Sample,
)
