"""Find the state in a run's directory from which to resume the loop."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from pipelines.generation.config import HOW_IT_RUNS
from rollout_io.configuration import flat
from rollout_io.dataset.filesystems import replace_text
from schemas.errors import InputError, count
from trainer.rl.config import RlConfig
from trainer.run.checkpoint import discard_after, latest_checkpoint
from trainer.run.open_run import refuse_existing_run
from trainer.run.resume import check_same, fixed_keys, saved_config
from trainer.run.run import Progress
from trainer.run.token_records import discard_token_records

MAY_CHANGE = {
    *(
        "run.out",
        "run.keep_checkpoints",
        "run.trackers",
        "run.log_samples",
        "run.record_tokens",
        "data.dataset",
    ),
    *("batch.tokens_per_micro_batch", "batch.max_row_tokens"),
    *("loop.num_iterations", "loop.weight_sync", "loop.save_every_iterations"),
    *("loop.keep_weights", "loop.audit_rows", "loop.on_mismatch"),
    *(f"generate.{key}" for key in HOW_IT_RUNS - {"group_size"}),
}
"""Keys that do not affect existing results; neither do the keys of `[evaluate]`. `num_iterations` may
only grow, and is fixed if the learning rate decays towards the last update."""


_EVALUATED = "evaluation/return_mean"


def find_checkpoint(config: RlConfig, *, resume: bool) -> Path | None:
    """Return the checkpoint to resume from; None to start from the beginning.

    Raises:
        InputError: A run exists but `resume` is false, or the run's files are invalid.
        ConfigError: The run had a different configuration.
    """
    out = Path(config.run.out)
    if not resume:
        refuse_existing_run(out)
        return None
    saved = saved_config(out)
    if saved is not None:
        now, before = flat(config.resolved()), flat(saved)
        is_fixed = config.training.optimizer.learning_rate_schedule != "constant"
        may_change = MAY_CHANGE - ({"loop.num_iterations"} if is_fixed else set())
        may_change -= fixed_keys(config.training)
        may_change |= {key for key in now if key.partition(".")[0] == "evaluate"}
        check_same(before, now, may_change, out, growing="loop.num_iterations")
    return latest_checkpoint(out)


def roll_back(config: RlConfig, progress: Progress) -> dict[int, float | None]:
    """Roll a run's directory back to the state to resume from, and save the configuration.

    Returns:
        Mean returns of existing evaluations, by version.

    Raises:
        InputError: `metrics.jsonl` lacks updates that precede the checkpoint.
    """
    out = Path(config.run.out)
    metrics, records = out / "metrics.jsonl", dict[str, dict[str, Any]]()
    if metrics.exists():
        records = lines_before(metrics, progress)
        replace_text(metrics, "".join(records))
    discard_after(out, progress.global_step)
    discard_token_records(out, progress.global_step)
    for unfinished in (out / "weights").glob(".version_*"):
        unfinished.unlink() if unfinished.is_symlink() else shutil.rmtree(unfinished)
    replace_text(out / "config.json", json.dumps(config.resolved(), indent=2) + "\n")
    return {x["iteration"]: x[_EVALUATED] for x in records.values() if _EVALUATED in x}


def lines_before(path: Path, progress: Progress) -> dict[str, dict[str, Any]]:
    """Parse the lines up to a checkpoint, including the evaluation of its weights."""
    records: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        try:
            record = json.loads(line)
            if record["iteration"] < progress.position.batches_done + (_EVALUATED in record):
                records[line] = record
        except (ValueError, TypeError, KeyError) as error:
            expected = "a JSON object with the metrics of an iteration"
            raise InputError("resume_metrics", str(path), repr(line[:60]), expected) from error
    num_updates = sum(_EVALUATED not in record for record in records.values())
    if num_updates != progress.num_mini_batches:
        finding = count(num_updates, "update record")
        expected = f"{progress.num_mini_batches}, one per mini-batch trained before the checkpoint"
        raise InputError("resume_metrics", str(path), finding, expected)
    return records
