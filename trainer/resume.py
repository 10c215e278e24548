"""Which checkpoint a run goes on from, and what of the run's directory is kept."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from schemas.errors import RolloutError
from trainer.checkpoint import latest_checkpoint
from trainer.config import TrainConfig

MAY_CHANGE = {
    "out",
    "max_updates",
    "num_epochs",
    "save_every_updates",
    "keep_checkpoints",
    "trackers",
}
"""Keys that change nothing of the updates a run has made. The first two numbers may only grow, and
not where the learning rate goes down towards the last update."""
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}


def find_checkpoint(config: TrainConfig) -> Path | None:
    """The latest checkpoint of the run in `config.out`; None where there is none yet.

    Raises:
        RolloutError: The configuration is not that of the run; the pointer names nothing.
    """
    file = Path(config.out) / "config.json"
    if file.is_file():
        try:
            saved = dict(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            expected = "the configuration of a run"
            raise RolloutError("resume_config", str(file), str(error), expected) from error
        _check_same(saved, config)
    found = latest_checkpoint(Path(config.out))
    if found and not file.is_file():
        raise RolloutError("resume_config", str(file), "nothing", "the configuration of the run")
    return found


def _check_same(saved: dict[str, Any], config: TrainConfig) -> None:
    hint = "resume with the configuration of the run, or start another one"
    fixed = {"max_updates", "num_epochs"} if config.learning_rate_schedule != "constant" else set()
    given = json.loads(json.dumps(dataclasses.asdict(config)))
    kept = [key for key in given if key in fixed or key not in MAY_CHANGE]
    different = [key for key in kept if saved.get(key) != given[key]]
    if different:
        key, *others = different
        expected = f"{json.dumps(saved.get(key))}, as in {config.out}/config.json"
        also = f" (also different: {', '.join(others)})" if others else ""
        raise RolloutError("resume_config", key, json.dumps(given[key]), expected, hint + also)
    if config.num_epochs < saved.get("num_epochs", 1):
        expected = f"at least {saved['num_epochs']}"
        raise RolloutError("resume_config", "num_epochs", str(config.num_epochs), expected, hint)


def check_max_updates(config: TrainConfig, global_step: int) -> None:
    """Refuse to go on from beyond the end.

    Raises:
        RolloutError: `max_updates` is less than the checkpoint's updates.
    """
    if config.max_updates is not None and config.max_updates < global_step:
        got, expected = str(config.max_updates), f"at least {global_step}, which are made"
        raise RolloutError("resume_config", "max_updates", got, expected)


def lines_to_keep(path: Path, num_lines: int) -> bytes:
    """The first lines of `metrics.jsonl`.

    Raises:
        RolloutError: It has fewer.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines if line.endswith(b"\n")]
    if len(whole) < num_lines:
        got, expected = f"{len(whole)} lines", f"{num_lines}, one a mini-batch of the checkpoint"
        raise RolloutError("resume_metrics", str(path), got, expected)
    return b"".join(whole[:num_lines])


def cut(path: Path, num_bytes: int) -> None:
    """Leave the first bytes of a file, if there is one."""
    if path.exists():
        os.truncate(path, num_bytes)


@contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """Keep other processes from training into a directory; where its disk knows locks.

    Raises:
        RolloutError: One does.
    """
    with (out / ".lock").open("w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            hint = "wait for its end, or stop it"
            raise RolloutError(
                "run_goes_on", str(out), "a process that trains there", "none", hint
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield


@contextmanager
def stops_when_full(out: Path) -> Iterator[None]:
    """Turn a full disk into one message that says what the run can go on from.

    Raises:
        RolloutError: Nothing more can be written.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        if not _is_full(error):
            raise
        latest = latest_checkpoint(out)
        hint = f"make room and run again with --resume: {latest or 'no checkpoint'} is there"
        raise RolloutError("disk_full", str(out), str(error), "room to write", hint) from error


def _is_full(error: OSError | SafetensorError) -> bool:
    if isinstance(error, OSError):
        return error.errno in FULL
    return any(f"os error {number})" in str(error) for number in FULL)
