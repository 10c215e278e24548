"""Logs to convert, and what is in a directory then."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rollout_io
from rollout_io import convert
from schemas.errors import RolloutError
from tests.conftest import EXAMPLES, ROOT

SHOP = EXAMPLES / "shop.calls.jsonl"
REWARDS = EXAMPLES / "shop.rewards.jsonl"
SMALL_CHUNKS = 300_000
OUTPUT = {
    "prompt_token_ids": [[1, 2]],
    "response_ids": [[7]],
    "rewards": [1.0],
    "loss_masks": [[1]],
    "stop_reasons": ["stop"],
    "rollout_logprobs": None,
    "trajectory_ids": [{"instance_id": "shop", "repetition_id": 0}],
    "is_last_step": [True],
}
"""A `GeneratorOutput` of one step."""


def call(session, *ids, **fields):
    choice = {"token_ids": list(ids) or [7], "logprobs": None}
    response = {"prompt_token_ids": [1, 2], "choices": [choice]}
    return {"session": session, "request": {"messages": []}, "response": response} | fields


def write(path, *records):
    lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in records]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def files_in(folder):
    found = {str(path.relative_to(folder)): path for path in Path(folder).rglob("*")}
    return {name: path.is_file() and path.read_bytes() for name, path in found.items()}


def rejected_in(out):
    return [json.loads(line) for line in rejected_of(out).read_bytes().splitlines()]


def rejected_of(out):
    """The file of rejected records, beside the dataset."""
    return out.with_name(f"{out.name}.rejected.jsonl")


def table_of(*inputs, out, **choices):
    """The rows without the places they are from."""
    convert(inputs, out, format="calls", **choices)
    table = rollout_io.read(out)
    return table.drop_columns("source").replace_schema_metadata(None)


def refusal(*arguments, **keywords):
    with pytest.raises(RolloutError) as caught:
        convert(*arguments, **keywords)
    return caught.value


def in_subprocess(*arguments, **keywords):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text="input" not in keywords,
        check=False,
        **keywords,
    )


def damaged_shop(folder):
    """The shop's calls with two cut lines, of sessions that go on, and one of no session."""
    lines = SHOP.read_bytes().splitlines()
    lines[30], lines[150] = lines[30][:700], lines[150][:700]
    return write(folder / "shop.calls.jsonl", *lines[:100], b"not a call", *lines[100:])
