"""Copies between the CPU and a GPU that neither waits for the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


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
