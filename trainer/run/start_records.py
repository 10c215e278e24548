"""Record the starts of a run in `RUN/starts.jsonl`: the machine, and settings that may change.

Results of floating-point arithmetic depend on the number of threads and on how rows are packed,
among other things. Each start or resumption of a run writes a line, so that an update can be
replayed under the same conditions.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator

import rollout_io
from rollout_io.dataset.filesystems import replace_text
from schemas.errors import count
from trainer.config.train_config import TrainConfig
from trainer.run.messages import say

FILE = "starts.jsonl"
MACHINE = ("device", "num_processes", "torch", "transformers")
"""Keys of a line whose values affect the results, besides the number of threads."""
CHANGING = ("tokens_per_micro_batch", "max_row_tokens")
"""Keys of the section `[batch]` that affect updates, and that `--resume` may change."""


def this_machine(accelerator: Accelerator) -> dict[str, Any]:
    """Return the number of threads and processes, the device and software versions, for JSON."""
    device = accelerator.device
    if device.type == "cpu":
        name = f"CPU {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    else:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "num_threads": torch.get_num_threads(),
        "num_processes": accelerator.num_processes,
        "device": name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rollout_io": rollout_io.__version__,
    }


def record_start(
    out: Path, accelerator: Accelerator, config: TrainConfig, global_step: int
) -> None:
    """Add a line to `starts.jsonl` for a run that starts or resumes after `global_step` updates.

    Existing lines with the same or a larger `global_step` are removed. A note is logged if the
    number of processes differs from the last start's.
    """
    starts, num = starts_of(out), accelerator.num_processes
    before = starts[-1].get("num_processes") if starts else None
    if isinstance(before, int) and before != num:
        here, used = count(num, "process", "es"), count(before, "process", "es")
        say(f"note: training in {here}; the run used {used} so far (--num-processes)")
    lines = [line for line in starts if line["global_step"] < global_step]
    settings = {key: getattr(config.batch, key) for key in CHANGING}
    lines.append({"global_step": global_step} | this_machine(accelerator) | settings)
    replace_text(out / FILE, "".join(f"{json.dumps(line)}\n" for line in lines))


def starts_of(out: Path) -> list[dict[str, Any]]:
    """Read a run's `starts.jsonl`, ordered by `global_step`; empty if the file cannot be read."""
    file = out / FILE
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        return sorted(lines, key=lambda line: int(line["global_step"]))
    except (OSError, ValueError, TypeError, KeyError):
        return []


def start_of(out: Path, update: int) -> dict[str, Any]:
    """Return the line of `starts.jsonl` for the process that made an update; empty if unknown."""
    before = [line for line in starts_of(out) if line["global_step"] < update]
    return before[-1] if before else {}


def set_threads(start: Mapping[str, Any]) -> None:
    """Set this process's number of threads to the number in a line of `starts.jsonl`, if any."""
    wanted = start.get("num_threads")
    if isinstance(wanted, int) and wanted > 0 and wanted != torch.get_num_threads():
        torch.set_num_threads(wanted)
