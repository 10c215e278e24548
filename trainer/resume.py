"""Which checkpoint a run goes on from, and what of the run's directory is kept."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
from collections.abc import Collection, Iterator, Mapping
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
_HINT = "resume with the configuration of the run, or start another one"
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}


def find_checkpoint(config: TrainConfig) -> Path | None:
    """The latest checkpoint of the run in `config.out`; None where there is none yet.

    Raises:
        RolloutError: The configuration is not that of the run; the pointer names nothing.
    """
    saved = saved_config(Path(config.out))
    if saved is not None:
        _check_same(saved, config)
    found = latest_checkpoint(Path(config.out))
    if found and saved is None:
        file = f"{config.out}/config.json"
        raise RolloutError("resume_config", file, "nothing", "the configuration of the run")
    return found


def saved_config(out: Path) -> dict[str, Any] | None:
    """The configuration that a run has left in its directory, if there is one.

    Raises:
        RolloutError: It cannot be read.
    """
    file = out / "config.json"
    if not file.is_file():
        return None
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        expected = "the configuration of a run"
        raise RolloutError("resume_config", str(file), str(error), expected) from error


def _check_same(saved: dict[str, Any], config: TrainConfig) -> None:
    fixed = {"max_updates", "num_epochs"} if config.learning_rate_schedule != "constant" else set()
    check_same(saved, dataclasses.asdict(config), MAY_CHANGE - fixed, Path(config.out))
    check_not_fewer(saved, "num_epochs", config.num_epochs)


def check_same(
    saved: Mapping[str, Any], given: Mapping[str, Any], may_change: Collection[str], out: Path
) -> None:
    """Refuse another configuration than a run began with.

    Raises:
        RolloutError: Names the first key that differs and may not.
    """
    now = json.loads(json.dumps(given))
    kept = [key for key in now if key not in may_change]
    different = [key for key in kept if saved.get(key) != now[key]]
    if different:
        key, *others = different
        expected = f"{json.dumps(saved.get(key))}, as in {out}/config.json"
        also = f" (also different: {', '.join(others)})" if others else ""
        raise RolloutError("resume_config", key, json.dumps(now[key]), expected, _HINT + also)


def check_not_fewer(saved: Mapping[str, Any], key: str, number: int) -> None:
    """Refuse a number that went down.

    Raises:
        RolloutError: It did.
    """
    if number < saved.get(key, 1):
        expected = f"at least {saved[key]}"
        raise RolloutError("resume_config", key, str(number), expected, _HINT)


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
