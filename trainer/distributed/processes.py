"""Exchange results between the processes that train one model.

All processes make the same plan and have the same batch. Each process reads and forwards a part of
the batch, and the processes exchange results so that all have the same values. With a single
process, nothing is exchanged.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import polars as pl

from schemas.errors import InputError, RolloutError, decode, encode
from trainer.distributed.liveness import lost_error

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor

    from trainer.batches.forest import Forest

T = TypeVar("T")
STORE = "ROLLOUTS_PROCESS_STORE"
"""Environment variable with the file through which the processes of `--num-processes` connect."""
STARTER = "ROLLOUTS_PROCESS_STARTER"
"""Environment variable with the id of the process that started them."""


def is_main() -> bool:
    """True for the process that writes files and prints."""
    return int(os.environ.get("RANK", "0")) == 0


def is_first_here() -> bool:
    """True for the first process on each machine, which prints the errors of all."""
    return int(os.environ.get("LOCAL_RANK", "0")) == 0


@contextmanager
def lost_processes() -> Iterator[None]:
    """Turn a failed exchange with a process that has ended or hangs into an error.

    gloo notices at once that a process has ended, because its connections are closed. Of several
    machines, `trainer.distributed.liveness` knows which is lost.

    Raises:
        InputError: `process_lost`: a process of the run ended or did not respond in time.
    """
    try:
        yield
    except RuntimeError as error:
        reason = _lost(error)
        if reason is None:
            raise
        if named := lost_error():
            raise named from error
        finding = f"another process of the run has ended or does not respond ({reason})"
        hint = "look for its own error above; continue with --resume RUN"
        raise InputError("process_lost", _this_process(), finding, hint=hint) from error


def _lost(error: RuntimeError) -> str | None:
    """Return why an exchange failed; None for errors that other processes did not cause."""
    from torch.distributed import DistNetworkError

    text = str(error)
    if isinstance(error, DistNetworkError):
        return text.partition("\n")[0]
    if "gloo/transport" in text:
        return text.rpartition(".cc:")[2].partition("] ")[2].partition(". ")[0]
    # NCCL also raises this kind of error if it cannot be set up on this machine.
    ends = "remote process exited", "communicator was aborted"
    return next((end for end in ends if "NCCL" in text and end in text), None)


def _this_process() -> str:
    rank, size = (int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE"))
    return f"rank {rank} (of {size} processes)"


def gather_bytes(accelerator: Accelerator, data: bytes) -> list[bytes]:
    """All-gather each process's bytes, ordered by rank."""
    if accelerator.num_processes == 1:
        return [data]
    import torch

    device = accelerator.device
    sizes = accelerator.gather(torch.tensor([len(data)], device=device)).tolist()
    padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
    if data:
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    gathered = accelerator.gather(padded.to(device)).view(len(sizes), -1).cpu().numpy()
    return [row[:size].tobytes() for row, size in zip(gathered, sizes, strict=True)]


def agreed(accelerator: Accelerator, work: Callable[[], T]) -> T:
    """Run local work in every process; a user error in one process is raised in all.

    Returns the local result of `work`, which must not communicate, once all processes are done.

    Raises:
        RolloutError: `work` raises it in any process; an error in this process takes precedence.
    """
    if accelerator.num_processes == 1:
        return work()
    failure: RolloutError | None = None
    try:
        result = work()
    except (RolloutError, OSError) as error:
        failure = as_rollout_error(error)
    message = json.dumps(encode(failure)).encode() if failure else b""
    others = [text for text in gather_bytes(accelerator, message) if text]
    if failure:
        raise failure
    if others:
        raise decode(json.loads(others[0]))
    return result


def as_rollout_error(error: RolloutError | OSError) -> RolloutError:
    """Return the error, or an error of the user for one of the operating system."""
    if isinstance(error, RolloutError):
        return error
    return InputError("file", str(error.filename), (error.strerror or str(error)).lower())


def on_main(accelerator: Accelerator, work: Callable[[], object]) -> None:
    """Run work in the main process while the others wait.

    Raises:
        RolloutError: `work` raises the error, which is then raised in every process.
    """
    agreed(accelerator, lambda: work() if accelerator.is_main_process else None)


def own_groups(accelerator: Accelerator, groups: Sequence[str]) -> Sequence[str]:
    """Select the contiguous range of a batch's groups that this process reads."""
    num, rank = len(groups), accelerator.process_index
    bounds = [num * r // accelerator.num_processes for r in (rank, rank + 1)]
    return groups[slice(*bounds)]


def exchange_rows(accelerator: Accelerator, rows: pl.DataFrame | None) -> pl.DataFrame:
    """Concatenate the rows of all processes by rank; `rows` is None if this process read none."""
    if accelerator.num_processes == 1:
        assert rows is not None
        return rows
    file = io.BytesIO()
    if rows is not None:
        rows.write_ipc(file)
    parts = [data for data in gather_bytes(accelerator, file.getvalue()) if data]
    return pl.concat([pl.read_ipc(io.BytesIO(data)) for data in parts])


def combine(accelerator: Accelerator, values: Tensor, forests: Sequence[Forest]) -> Tensor:
    """Combine the values that each process computed for its targets.

    Args:
        accelerator: The Accelerator of the run.
        values: [T] float32 on the CPU, known at the targets of this process's micro-batches, 0
            elsewhere.
        forests: The micro-batches of all processes; they determine which tokens are targets.

    Returns:
        [T] float32 on the CPU; NaN where there is no target.
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
    """Gather the named tensors of all micro-batches on the CPU, ordered by micro-batch number.

    `parts` are the tensors of this process's micro-batches, by number; fillers (below 0) are
    ignored.
    """
    if accelerator.num_processes == 1:
        return [parts[number] for number in sorted(parts)]
    from safetensors.torch import load, save

    flat = {f"{k} {name}": t for k, part in parts.items() if k >= 0 for name, t in part.items()}
    gathered: dict[int, dict[str, Tensor]] = {}
    for data in gather_bytes(accelerator, save(flat)):
        for key, tensor in load(data).items():
            number, _, name = key.partition(" ")
            gathered.setdefault(int(number), {})[name] = tensor
    names = dict.fromkeys(next(iter(parts.values()), {}))
    names |= dict.fromkeys(name for part in gathered.values() for name in part)
    return [
        {name: gathered[number][name] for name in names if name in gathered[number]}
        for number in sorted(gathered)
    ]
