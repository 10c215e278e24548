"""Find the checkpoint to resume from, and the part of the run's directory to keep."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rollout_io.configuration import flat
from schemas.errors import ConfigError, InputError, count
from trainer.config.train_config import PATHS, TrainConfig
from trainer.run.checkpoint import latest_checkpoint
from trainer.run.messages import say

MAY_CHANGE = {
    "run.out",
    "batch.max_updates",
    "batch.num_epochs",
    "run.save_every_updates",
    "run.keep_checkpoints",
    "batch.max_row_tokens",
    "batch.tokens_per_micro_batch",
    "run.record_tokens",
    "run.trackers",
    "run.log_samples",
}
"""Keys that do not affect past updates. `max_updates` and `num_epochs` may only grow, and
are fixed if the learning rate decays towards the last update."""
SETTINGS = "config.json"
"""File of a checkpoint's state: the configuration of the updates before it."""
_HINT = "resume with the configuration of the run, or start a new run"


def fixed_keys(config: TrainConfig) -> set[str]:
    """Return the keys of `MAY_CHANGE` that must not change under this configuration.

    These keys affect past updates, for example through the learning-rate schedule.
    """
    decays = config.optimizer.learning_rate_schedule != "constant"
    by_micro_batch = "micro_batch" in config.loss.reduction_inputs
    fixed = {"batch.max_updates", "batch.num_epochs"} if decays else set()
    return fixed | ({"batch.tokens_per_micro_batch"} if by_micro_batch else set())


def find_checkpoint(config: TrainConfig) -> Path | None:
    """Return the latest checkpoint of the run in `config.run.out`; None if there is none yet.

    Raises:
        ConfigError: The configuration differs from the run's.
        InputError: `config.json` or `latest` is missing or invalid.
    """
    out = Path(config.run.out)
    saved = saved_config(out)
    if saved is not None:
        may_change = MAY_CHANGE - fixed_keys(config)
        before, now = (flat(values) for values in (saved, dataclasses.asdict(config)))
        check_same(before, now, may_change, out, growing="batch.num_epochs")
    latest = latest_checkpoint(out)
    if saved and latest and (latest / "state" / SETTINGS).exists():
        # The run's file is a user's to edit; what past updates used is not.
        used = json.loads((latest / "state" / SETTINGS).read_bytes())
        may_change = MAY_CHANGE | PATHS
        check_same(used, now, may_change, latest / "state", growing="batch.num_epochs")
    return latest


def fixed_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings by `section.key`, except paths and what may change."""
    settings = flat(dataclasses.asdict(config))
    return {key: settings[key] for key in settings if key not in MAY_CHANGE | PATHS}


def say_if_new(out: Path) -> None:
    """Log a note if there is no run to resume, because a mistyped name would start a second one."""
    if not (out / "config.json").is_file():
        say(f"no run in {out}: starting from the beginning")


def saved_config(out: Path) -> dict[str, Any] | None:
    """Read the configuration that a run saved in its directory; None if it has not saved any yet.

    Raises:
        InputError: The file cannot be read, or is missing although the run has checkpoints.
    """
    file = out / "config.json"
    if not file.is_file():
        if checkpoint := latest_checkpoint(out):
            finding = "the file is missing, although the run has checkpoints"
            hint = f"restore the file, or start a new run: --model {checkpoint}"
            raise InputError("resume_config", str(file), finding, hint=hint)
        return None
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        finding = f"cannot read the configuration of the run: {error}"
        raise InputError("resume_config", str(file), finding) from error


def check_same(
    saved: Mapping[str, Any],
    settings: Mapping[str, Any],
    may_change: Collection[str],
    out: Path,
    *,
    growing: str,
) -> None:
    """Check that a configuration equals the saved configuration of the run to resume.

    Keys of sections are `section.key`.

    Raises:
        ConfigError: A key that must not change has a different value, or `growing` has decreased.
    """
    # As they will be read back: tuples become lists, and numbers keep what JSON keeps.
    now = json.loads(json.dumps(settings))
    fixed = [key for key in now if key not in may_change]
    # A run of an earlier version lacks newer keys; an empty value does not affect its updates.
    compared = [key for key in fixed if key in saved or now[key]]
    different = [key for key in compared if saved.get(key) != now[key]]
    if different:
        key, *others = different
        expected = f"{json.dumps(saved.get(key))}, as in {out}/config.json"
        also = f" (also different: {', '.join(others)})" if others else ""
        raise ConfigError("resume_config", key, json.dumps(now[key]), expected, _HINT + also)
    if now[growing] < saved.get(growing, 1):
        expected = f"at least {saved[growing]}"
        raise ConfigError("resume_config", growing, str(now[growing]), expected, _HINT)


def check_max_updates(max_updates: int | None, global_step: int) -> None:
    """Check that a run does not resume beyond its end.

    Raises:
        ConfigError: `batch.max_updates` is less than the number of updates before the checkpoint.
    """
    if max_updates is not None and max_updates < global_step:
        expected = f"at least {global_step}, the number of updates already made"
        raise ConfigError("resume_config", "batch.max_updates", str(max_updates), expected)


def lines_to_keep(path: Path, num_lines: int) -> bytes:
    """Read the first `num_lines` lines of `metrics.jsonl`.

    Raises:
        InputError: The file has fewer lines.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines if line.endswith(b"\n")]
    if len(whole) < num_lines:
        expected = f"{num_lines}, one per mini-batch trained before the checkpoint"
        raise InputError("resume_metrics", str(path), count(len(whole), "line"), expected)
    return b"".join(whole[:num_lines])
