"""What overlaps with training: reading the next batch, and copies between the CPU and a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from threading import Thread
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Key = TypeVar("Key")
Value = TypeVar("Value")


def one_ahead(read: Callable[[Key], Value], keys: Iterable[Key]) -> Iterator[Value]:
    """Yield `read(key)` for each key in order, reading the next value in the background.

    At most two values are in memory: the last one yielded, and the next. An error in `read` is raised
    when its value would have been yielded. A caller that stops early does not wait: the thread ends
    after its read, or with the process.

    Example:
        >>> list(one_ahead(str.upper, ["a", "b"]))
        ['A', 'B']
    """
    readings = (_Reading(read, key) for key in keys)
    coming = next(readings, None)
    while coming is not None:
        value = coming.result()
        coming = next(readings, None)
        yield value
        # Drop the reference, or three values would be alive during the next read.
        del value


class _Reading(Thread, Generic[Key, Value]):
    """A thread that calls `read(key)` once and keeps its result or error."""

    def __init__(self, read: Callable[[Key], Value], key: Key) -> None:
        super().__init__(daemon=True, name="read-ahead")
        self.read, self.key = read, key
        self.value: list[Value] = []
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.value.append(self.read(self.key))
        except BaseException as error:
            self.error = error

    def result(self) -> Value:
        self.join()
        if self.error is not None:
            raise self.error
        return self.value.pop()


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the CPU to a device; a GPU reads it from pinned memory while both go on."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def columns_to_device(columns: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copy [M] columns of numbers with one transfer; each keeps its dtype.

    They travel as float64, which represents float32, booleans and indices exactly.
    """
    moved = to_device(torch.stack([values.double() for values in columns.values()]), device)
    names = zip(columns, moved, strict=True)
    return {name: values.to(columns[name].dtype) for name, values in names}


class CopyToCpu:
    """Named tensors on their way to the CPU, in one transfer.

    Args:
        values: Tensors of any shape and a dtype that float64 represents exactly, on one device.
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._like = {name: (tensor.shape, tensor.dtype) for name, tensor in values.items()}
        flat = [tensor.detach().reshape(-1).double() for tensor in values.values()]
        together = torch.cat(flat) if flat else torch.zeros(0, dtype=torch.float64)
        self._values = together.to("cpu", non_blocking=together.is_cuda)
        self._event: Any = None
        if together.is_cuda:
            self._event = torch.Event("cuda")
            self._event.record()

    def read(self) -> dict[str, Tensor]:
        """Wait until the tensors have arrived, and return them with their shapes and dtypes."""
        if self._event:
            self._event.synchronize()
        split: Any = self._values.split
        parts = split([shape.numel() for shape, _ in self._like.values()])
        named = zip(self._like.items(), parts, strict=True)
        return {name: part.view(shape).to(dtype) for (name, (shape, dtype)), part in named}
