"""Several processes that train one model: what they tell each other.

All of them make the same plan and hold the same batch; each reads and forwards its own share, and
what comes of it is exchanged, so that every number is everyone's. With one process nothing here
does anything.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import polars as pl

from schemas.errors import RolloutError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor

    from trainer.forest import Forest

T = TypeVar("T")


def is_main() -> bool:
    """Whether this process speaks for all: it writes, and talks to people."""
    return int(os.environ.get("RANK", "0")) == 0


def gather_bytes(accelerator: Accelerator, data: bytes) -> list[bytes]:
    """What every process has, in each of them; by rank."""
    if accelerator.num_processes == 1:
        return [data]
    import torch

    device = accelerator.device
    sizes = accelerator.gather(torch.tensor([len(data)], device=device)).tolist()
    padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
    if data:
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    found = accelerator.gather(padded.to(device)).view(len(sizes), -1).cpu().numpy()
    return [row[:size].tobytes() for row, size in zip(found, sizes, strict=True)]


def agreed(accelerator: Accelerator, work: Callable[[], T]) -> T:
    """Do what every process does by itself; a user's error in one of them is everyone's.

    Args:
        accelerator: Knows the processes.
        work: Exchanges nothing.

    Returns:
        What `work` returns here, once it is done everywhere.

    Raises:
        RolloutError: `work` raised one here, or else in another process.
    """
    if accelerator.num_processes == 1:
        return work()
    failure: RolloutError | None = None
    try:
        result = work()
    except RolloutError as error:
        failure = error
    except OSError as error:
        got = (error.strerror or str(error)).lower()
        failure = RolloutError("file", str(error.filename), got)
    said = json.dumps(failure.args).encode() if failure else b""
    others = [found for found in gather_bytes(accelerator, said) if found]
    if failure:
        raise failure
    if others:
        raise RolloutError(*json.loads(others[0]))
    return result


def on_main(accelerator: Accelerator, work: Callable[[], object]) -> None:
    """Have the main process do something for all, which wait for it.

    Raises:
        RolloutError: It raised one; every process does.
    """
    agreed(accelerator, lambda: work() if accelerator.is_main_process else None)


def own_groups(accelerator: Accelerator, groups: Sequence[str]) -> Sequence[str]:
    """The share of a batch's groups that this process reads; contiguous, by rank."""
    num, rank = len(groups), accelerator.process_index
    bounds = [num * r // accelerator.num_processes for r in (rank, rank + 1)]
    return groups[slice(*bounds)]


def exchange_rows(accelerator: Accelerator, rows: pl.DataFrame | None) -> pl.DataFrame:
    """The rows that all processes read, in the order of their ranks; None where one read nothing."""
    if accelerator.num_processes == 1:
        assert rows is not None
        return rows
    file = io.BytesIO()
    if rows is not None:
        rows.write_ipc(file)
    parts = [data for data in gather_bytes(accelerator, file.getvalue()) if data]
    return pl.concat([pl.read_ipc(io.BytesIO(data)) for data in parts])


def combine(accelerator: Accelerator, values: Tensor, forests: Sequence[Forest]) -> Tensor:
    """Put together what each process knows of its targets.

    Args:
        accelerator: Knows the processes.
        values: [T] float32 on the CPU, known here at the targets of this process's share.
        forests: The micro-batches that were shared out: their targets are known to someone.

    Returns:
        [T] float32 on the CPU; NaN at what is no target.
    """
    import torch

    targets = torch.zeros(len(values), dtype=torch.bool)
    for forest in forests:
        targets[forest.target_slot] = True
    if accelerator.num_processes > 1:
        values = accelerator.reduce(values.to(accelerator.device), reduction="sum").cpu()
    return torch.where(targets, values, torch.nan)


def gather_parts(
    accelerator: Accelerator, parts: Mapping[int, Mapping[str, Tensor]]
) -> list[Mapping[str, Tensor]]:
    """Named tensors of every numbered micro-batch, in the order of the numbers; on the CPU.

    Args:
        accelerator: Knows the processes.
        parts: Those of this process's share; fillers have a number below 0 and are left out.
    """
    if accelerator.num_processes == 1:
        return [parts[number] for number in sorted(parts)]
    from safetensors.torch import load, save

    own = {f"{k} {name}": t for k, part in parts.items() if k >= 0 for name, t in part.items()}
    found: dict[int, dict[str, Tensor]] = {}
    for data in gather_bytes(accelerator, save(own)):
        for key, tensor in load(data).items():
            number, _, name = key.partition(" ")
            found.setdefault(int(number), {})[name] = tensor
    names = list(next(iter(parts.values()), {}))
    return [{name: found[number][name] for name in names} for number in sorted(found)]
