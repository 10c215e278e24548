"""The `skyrl_evals` format: what SkyRL dumps beside its checkpoints; recognized, and refused.

    dumped_evals/.../<data source>.jsonl   {"input_prompt": "...", "output_response": "...",
                                            "score": 1.0, "stop_reason": "stop", "env_class": "gsm8k"}
    dumped_evals/.../aggregated_results.jsonl   metrics of all of them: no rollouts
    dumped_data/global_step_N_training_input.pkl   a pickle: to read it is to run it

The text of an evaluation is decoded (see `plain_text`). Its directory is one log.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from rollout_io.adapters import Adapter, Found, Input, Place, Progress, Rejected
from rollout_io.adapters.detect import has_record
from rollout_io.adapters.plain_text import find_texts, read_nothing
from schemas.errors import RolloutError

AGGREGATED = "aggregated_results.jsonl"
_WHAT = "decoded text of an evaluation"
_HINT = "in Python, rollout_io.from_generator_output takes SkyRL's GeneratorOutput with its ids"
_BATCH = b"TrainingInputBatch"
_HEAD_BYTES = 1 << 12


class _Sample(msgspec.Struct, gc=False):
    input_prompt: str
    output_response: str
    env_class: str | None
    score: float | list[float] | None = None


_DECODER = msgspec.json.Decoder(_Sample)
_find_evals = find_texts(_DECODER, _WHAT, _HINT)


def find_dumps(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Nothing but refusals; `aggregated_results.jsonl` has no records."""
    for given in inputs:
        if given.path.is_dir():
            yield from _find_evals(_evals(given), progress)
        elif _is_pickle(given.path):
            yield _refused_pickle(given, progress)
        else:
            yield from _find_evals([given], progress)


def _evals(given: Input) -> list[Input]:
    found = sorted(p for p in given.path.glob("*.jsonl") if p.name != AGGREGATED)
    return [Input(f"{given.name}/{path.name}", path) for path in found]


def _refused_pickle(given: Input, progress: Progress) -> Rejected:
    num_bytes = given.path.stat().st_size
    progress(num_bytes)
    got, expected = "a pickled TrainingInputBatch", "data: a pickle is a program, and is not run"
    error = RolloutError("pickle", given.name, got, expected, _HINT)
    return Rejected(Place(given.path, given.name, 0, num_bytes), error)


def _is_pickle(path: Path) -> bool:
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return False
    return head.startswith(b"\x80") and _BATCH in head


def recognizes(path: Path) -> bool:
    """Whether a file has lines of an evaluation or is a pickled batch, or a directory has evaluations."""
    try:
        if path.is_dir():
            evals = _evals(Input("", path))
            return bool(evals) and all(has_record(e.path, _DECODER) for e in evals)
    except OSError:
        return False
    return _is_pickle(path) or has_record(path, _DECODER)


ADAPTER = Adapter(
    summary="SkyRL's dumped evaluations (decoded text) and batches (pickles): refused by name",
    recognizes=recognizes,
    find=find_dumps,
    read=read_nothing,
    is_text=True,
)
