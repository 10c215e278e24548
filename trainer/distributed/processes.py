"""Exchange results between the processes that train one model, and pool numbers that they hold.

All processes make the same plan. Each reads a part of a batch, sends its rows to the processes that
forward them, and knows only the sizes of the other rows. Numbers of single targets are gathered only
where a result depends on all of them; of others, only statistics are exchanged (`Pooled`). With a
single process, nothing is exchanged.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from schemas.errors import InputError, RolloutError, decode, encode
from schemas.ragged import IntArray
from trainer.distributed.liveness import lost_error

if TYPE_CHECKING:
    from types import FrameType

    from accelerate import Accelerator
    from torch import Tensor

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


def raise_in_all(accelerator: Accelerator, *failures: RolloutError | OSError) -> None:
    """Raise the first of this process's failures, if any, in every process; see `agreed`."""

    def first() -> None:
        for failure in failures:
            raise failure

    agreed(accelerator, first)


def local_groups(accelerator: Accelerator, groups: Sequence[str]) -> Sequence[str]:
    """Select the contiguous range of a batch's groups that this process reads."""
    num, rank = len(groups), accelerator.process_index
    bounds = [num * r // accelerator.num_processes for r in (rank, rank + 1)]
    return groups[slice(*bounds)]


def exchanged(accelerator: Accelerator, parts: Sequence[bytes]) -> list[bytes]:
    """Send each process its part; return what each process sent to this one, ordered by rank."""
    if accelerator.num_processes == 1:
        return list(parts)
    import torch
    from torch import distributed

    device = accelerator.device
    sizes = torch.tensor([len(part) for part in parts], device=device)
    coming = torch.empty_like(sizes)
    distributed.all_to_all_single(coming, sizes)
    data = torch.frombuffer(bytearray(b"".join(parts) or b"-"), dtype=torch.uint8)
    received = torch.empty(int(coming.sum()), dtype=torch.uint8, device=device)
    data = data[: int(sizes.sum())].to(device)
    distributed.all_to_all_single(received, data, coming.tolist(), sizes.tolist())
    split: Any = received.cpu().split
    return [part.numpy().tobytes() for part in split(coming.tolist())]


def gather_in_main(accelerator: Accelerator, data: bytes) -> list[bytes]:
    """Send each process's bytes to the main process, ordered by rank; other processes get none."""
    to_main = [data, *[b""] * (accelerator.num_processes - 1)]
    received = exchanged(accelerator, to_main)
    return received if accelerator.is_main_process else []


def over_processes(
    accelerator: Accelerator, values: npt.ArrayLike, reduction: Literal["sum", "max"]
) -> npt.NDArray[np.float64]:
    """Return the sums or maxima over all processes of a few numbers, as float64."""
    numbers = np.array(values, np.float64)
    if accelerator.num_processes == 1:
        return numbers
    import torch
    from torch.distributed import ReduceOp, all_reduce

    reduced = torch.from_numpy(numbers).to(accelerator.device)
    all_reduce(reduced, ReduceOp.SUM if reduction == "sum" else ReduceOp.MAX)
    return np.asarray(reduced.cpu().numpy())


def of_all_processes(
    accelerator: Accelerator, key: IntArray, columns: Sequence[npt.NDArray[Any]]
) -> tuple[list[npt.NDArray[Any]], IntArray]:
    """Gather numbers of every target where a result depends on all of them.

    Args:
        accelerator: The Accelerator of the run.
        key: [M] row or trajectory of this process's targets, ascending; no other process has it.
        columns: [M] numbers of these targets.

    Returns:
        The columns of the targets of all processes, ordered by `key`, and the [M] positions of this
        process's targets in them.
    """
    if accelerator.num_processes == 1:
        return list(columns), np.arange(len(key))
    together = np.stack([key, *columns], axis=1).astype(np.float64)
    parts = [np.frombuffer(data) for data in gather_bytes(accelerator, together.tobytes())]
    every = np.concatenate(parts).reshape(-1, together.shape[1])
    first = sum(map(len, parts[: accelerator.process_index])) // together.shape[1]
    order = np.argsort(every[:, 0], kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    ordered = every[order]
    whole = [ordered[:, i].astype(c.dtype) for i, c in enumerate(columns, start=1)]
    return whole, place[first : first + len(key)]


@contextmanager
def handling(
    handler: Callable[[int, FrameType | None], object] | signal.Handlers, numbers: Sequence[int]
) -> Iterator[None]:
    """Handle signals in the `with` block; outside the main thread, which gets them, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, earlier in zip(numbers, before, strict=True):
            signal.signal(number, earlier)


_BITS, _DIGIT = 64, 4


class Pooled:
    """[M] numbers of all processes, of which each holds a part; only statistics are exchanged.

    All processes must ask for the same statistics in the same order.

    Args:
        accelerator: The Accelerator of the run; None: there is one process.
        values: The numbers of this process, on the CPU.

    Attributes:
        number: M.
    """

    def __init__(self, accelerator: Accelerator | None, values: Tensor) -> None:
        self._accelerator, self._values = accelerator, values
        self._is_alone = accelerator is None or accelerator.num_processes == 1
        self.number = int(self._over([len(values)], "sum")[0])

    def _over(self, numbers: Sequence[float], how: Literal["sum", "max"]) -> Sequence[float]:
        if self._accelerator is None:
            return numbers
        return [float(x) for x in over_processes(self._accelerator, numbers, how)]

    @cached_property
    def sum(self) -> float:
        """Sum of the numbers."""
        return self._over([float(self._values.sum())], "sum")[0]

    @cached_property
    def mean(self) -> float:
        """Mean of the numbers, of which there must be one."""
        return float(self._values.mean()) if self._is_alone else self.sum / self.number

    @cached_property
    def highest(self) -> float:
        """Largest number."""
        largest = float(self._values.max()) if len(self._values) else -np.inf
        return self._over([largest], "max")[0]

    @cached_property
    def lowest(self) -> float:
        """Smallest number."""
        smallest = float(self._values.min()) if len(self._values) else np.inf
        return -self._over([-smallest], "max")[0]

    @cached_property
    def has_nan(self) -> bool:
        """True if any number is NaN."""
        return self._over([float(self._values.isnan().any())], "max")[0] > 0

    @cached_property
    def deviation(self) -> float:
        """Sample standard deviation; 0 for a single number."""
        if self.number <= 1:
            return 0.0
        if self._is_alone:
            return float(self._values.std())
        squares = self._over([float(((self._values.double() - self.mean) ** 2).sum())], "sum")[0]
        return float(np.sqrt(squares / (self.number - 1)))

    def percentiles(self, wanted: Sequence[int]) -> list[float]:
        """Return percentiles as `np.percentile` does, of numbers that are not negative.

        The bits of such float64 numbers have the order of the numbers, so that a number of a rank is
        found digit by digit: in each round the processes add up how many numbers have each digit.
        """
        if self._is_alone:
            return [float(x) for x in np.percentile(self._values.numpy(), wanted)]
        # A percentile lies between the numbers of two ranks; both are found in the same rounds.
        at = np.array(wanted) / 100 * (self.number - 1)
        ranks = np.concatenate([np.floor(at), np.ceil(at)])
        bits = np.sort(np.abs(self._values.double().numpy())).view(np.uint64)
        prefix = np.zeros(len(ranks), np.uint64)
        for shift in range(_BITS - _DIGIT, -1, -_DIGIT):
            digits = np.arange(1 << _DIGIT, dtype=np.uint64) << np.uint64(shift)
            last = np.uint64((1 << shift) - 1)
            starts = np.searchsorted(bits, prefix[:, None] + digits, side="left")
            ends = np.searchsorted(bits, prefix[:, None] + digits + last, side="right")
            assert self._accelerator is not None
            # All numbers whose leading digits are those found so far, by their next digit.
            counts = over_processes(self._accelerator, ends - starts, "sum")
            upto = counts.cumsum(1)
            digit = (upto <= ranks[:, None]).sum(1)
            before = np.where(
                digit > 0, np.take_along_axis(upto, np.maximum(digit - 1, 0)[:, None], 1)[:, 0], 0
            )
            # From now on, ranks count among the numbers with these digits.
            ranks = ranks - before
            prefix = prefix + digits[digit]
        low, high = prefix.view(np.float64).reshape(2, -1)
        return [float(x) for x in low + (high - low) * (at - np.floor(at))]
