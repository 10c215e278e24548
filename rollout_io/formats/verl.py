r"""The `verl` format: verl's rollout and validation dumps, {step}.jsonl.

    {"input": "user\nWhat is 1 + 5?\nassistant\n", "output": "6", "gts": "6", "score": 1.0, "step": 1}

A line is a run. `input` and `output` were decoded without special tokens. The separators of
messages are therefore lost, and neither roles nor exact tokens can be recovered; the history of the
dataset records that. Lines of one file and step with the same `input` form a group, as the file
does not record verl's groups. The outcome is `score`; all other numbers (`reward_extra_info`) are
metrics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from rollout_io.formats.base import (
    About,
    Adapter,
    Completion,
    Found,
    Input,
    Options,
    Progress,
    Run,
    Trajectory,
)
from rollout_io.formats.detect import has_record
from rollout_io.formats.parsing.content import NO_JSON
from rollout_io.formats.parsing.fields import label, numbers
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.messages import prompt_key
from rollout_io.formats.parsing.naming import FilesApart
from rollout_io.formats.parsing.parts import decode_record
from rollout_io.formats.parsing.records import Record, find_lines, read_record

_GROUPS = "inferred: lines of one file and step with the same input"
_TEXT = "decoded without special tokens: the ids are approximate"
_NO_METRICS = frozenset({"step", "gts", "request_id"})


class _Sample(msgspec.Struct, gc=False):
    input: str
    output: str
    score: float
    step: int
    gts: msgspec.Raw = NO_JSON
    request_id: msgspec.Raw = NO_JSON


_DECODER = msgspec.json.Decoder(_Sample)
_FIELDS_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])


def find_samples(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Yield one run per line, in the order of the lines."""
    yield About("groups", _GROUPS)
    yield About("text", _TEXT)
    apart = FilesApart()

    def find(record: Record) -> Run:
        place = record.place
        sample = decode_line(_DECODER, record.content, place.where)
        key = prompt_key(sample.input)
        return Run(
            instance_id=f"{apart.name(f'step-{sample.step}', place.path)}/{key}",
            repetition_id=None,
            places=[place],
            labels={"step": str(sample.step), "prompt": key},
        )

    yield from find_lines(inputs, progress, find)


def read_sample(run: Run, _: Options) -> Trajectory:
    """Read the text of a line; all numbers of the line become metrics.

    Raises:
        InputError: `record_type`: a field has the wrong type, or a number is too large.
    """
    (place,) = run.places
    sample = decode_record(_DECODER, place)
    fields = decode_line(_FIELDS_DECODER, read_record(place), place.where)
    texts = {
        "step": str(sample.step),
        "gts": label(sample.gts, place.where),
        "request_id": label(sample.request_id, place.where),
    }
    step = Completion(
        source=place.where,
        prompt=sample.input,
        response=sample.output,
        has_special=(False, False),
    )
    return Trajectory(
        steps=[step],
        reward=sample.score,
        metrics=numbers({n: f for n, f in fields.items() if n not in _NO_METRICS}, place.where),
        user_values={name: text for name, text in texts.items() if text},
    )


def recognizes(path: Path) -> bool:
    """True if a file has lines with `input`, `output`, `score` and `step`."""
    return has_record(path, _DECODER)


ADAPTER = Adapter(
    summary="verl's dumps ({step}.jsonl): decoded text without roles",
    recognizes=recognizes,
    find=find_samples,
    read=read_sample,
    is_text=True,
    line=_Sample,
)
