r"""The `verl` format: verl's rollout and validation dumps, {step}.jsonl; recognized, and refused.

    {"input": "user\nWhat is 1 + 5?\nassistant\n", "output": "6", "score": 1.0, "step": 1}

`input` and `output` are decoded with the special tokens skipped: what separated the messages is gone,
so they can be neither taken for messages nor tokenised again (see `plain_text`).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from rollout_io.adapters import Adapter
from rollout_io.adapters.detect import has_record
from rollout_io.adapters.plain_text import find_texts, read_nothing

_WHAT = "decoded text whose special tokens were skipped"
_HINT = "log the calls of verl's rollout server (vLLM) with return_token_ids: the calls format"


class _Sample(msgspec.Struct, gc=False):
    input: str
    output: str
    score: float
    step: int


_DECODER = msgspec.json.Decoder(_Sample)


def recognizes(path: Path) -> bool:
    """Whether a file has lines with `input`, `output`, `score` and `step`."""
    return has_record(path, _DECODER)


ADAPTER = Adapter(
    summary="verl's dumps ({step}.jsonl): decoded text, refused by name",
    recognizes=recognizes,
    find=find_texts(_DECODER, _WHAT, _HINT),
    read=read_nothing,
    is_text=True,
)
