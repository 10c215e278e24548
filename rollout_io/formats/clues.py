"""Explain inputs that match no format: empty files, pickles, and parts of a Harbor job."""

from __future__ import annotations

import zipfile
from pathlib import Path

import msgspec

from rollout_io.dataset.opening import open_input
from rollout_io.formats.parsing.jsonl import read_document
from schemas.errors import InputError, RolloutError

PICKLE_HINT = """\
if it contains SkyRL's GeneratorOutput, write a dataset in the program that has this object:
  import rollout_io
  table = rollout_io.from_generator_output(output)
  with rollout_io.RolloutWriter("rollouts/") as writer:
      writer.write(table)
otherwise, write your data as JSON Lines in one of the formats of `rollouts formats`"""
_PROTOCOLS = tuple(bytes([0x80, number]) for number in range(2, 6))
_TORCH_MEMBER = "data.pkl"
_HEAD_BYTES = 1 << 16


class _HarborConfig(msgspec.Struct, gc=False):
    trial_name: str | None = None
    trials_dir: str | None = None
    job_name: str | None = None
    jobs_dir: str | None = None


class _QwenMessage(msgspec.Struct, gc=False):
    role: str
    parts: list[msgspec.Raw]


class _QwenLine(msgspec.Struct, gc=False):
    type: str
    uuid: str
    session_id: str = msgspec.field(name="sessionId")
    message: _QwenMessage


_QWEN = msgspec.json.Decoder(_QwenLine)
_HARBOR = msgspec.json.Decoder(_HarborConfig)


def explained(name: str, path: Path) -> InputError | None:
    """Return the error for an input of a known kind that is not a log; None for unknown content.

    Args:
        name: Name of the input in messages.
        path: The file, decompressed.
    """
    try:
        if not path.is_file():
            return None
        with open_input(path) as file:
            head = file.read(_HEAD_BYTES)
    except (OSError, RolloutError):
        return None
    if not head:
        return empty_file(name)
    return pickle_error(name, path) or _harbor_config(name, path) or _qwen_code(name, head)


def empty_file(name: str) -> InputError:
    """Return the error for an empty file."""
    hint = "check that the program that writes the file has finished"
    return InputError("input_file", name, "the file is empty", "", hint)


def pickle_error(name: str, path: Path) -> InputError | None:
    """Return the error for a pickle or a file of torch.save, recognised by its first bytes."""
    try:
        with open_input(path) as file:
            head = file.read(_HEAD_BYTES)
    except (OSError, RolloutError):
        return None
    if head.startswith(_PROTOCOLS):
        got = "the file is a pickle, which could run code, so it is never loaded"
    elif head.startswith(b"PK") and _is_saved_by_torch(path):
        got = "the file was written by torch.save: it is a pickle, which could run code, so it is never loaded"
    else:
        return None
    return InputError("pickle", name, got, hint=PICKLE_HINT)


def _is_saved_by_torch(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any(n.rpartition("/")[2] == _TORCH_MEMBER for n in archive.namelist())
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError):
        return False


def _harbor_config(name: str, path: Path) -> InputError | None:
    """Return the error for the `config.json` of a Harbor trial or job."""
    try:
        config = read_document(_HARBOR, path)[0]
    except RolloutError:
        return None
    if config.trial_name and config.trials_dir:
        got = "the file is the configuration of a Harbor trial, not its result"
        hint = f"pass the trial directory ({_above(name)}), or its result.json"
    elif config.job_name and config.jobs_dir:
        got = "the file is the configuration of a Harbor job, not its result"
        hint = f"pass the job directory ({_above(name)})"
    else:
        return None
    return InputError("harbor_input", name, got, hint=hint)


def _qwen_code(name: str, head: bytes) -> InputError | None:
    """Return the error for a session of Qwen Code, whose lines resemble those of Claude Code."""
    for line in head.splitlines():
        try:
            _QWEN.decode(line)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            continue
        got = "the file is a session of Qwen Code, which rollouts cannot read"
        hint = "record new sessions with `rollouts record`, which keeps the exact tokens"
        return InputError("known_format", name, got, "", hint)
    return None


def _above(name: str) -> str:
    return f"{name.rpartition('/')[0] or '.'}/"
