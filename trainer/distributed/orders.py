"""Orders: the main process tells the others what to do next."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from torch import distributed

from schemas.errors import RolloutError
from trainer.distributed.processes import lost_processes

FOREVER = timedelta(days=365)
"""Maximum time that processes wait for an order: sampling an iteration may take days."""
BRIEFLY = timedelta(seconds=60)
"""Maximum time between the first and last process to notice a failure that affects all
processes."""


class Orders:
    """Carries orders from the main process to the others.

    Between two orders, all processes have the same state. They carry out an order together, and
    exchange values as `train` does. With a single process, nothing is sent.

    Orders are sent over gloo, also between processes with GPUs: a process that waits for an order
    uses no GPU, and fails at once if another process ends. All processes create this object
    together.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._num_processes = accelerator.num_processes
        self._is_between = True
        if self._num_processes > 1:
            # Two groups, because gloo has one time limit a group.
            self._patient, self._brief = (
                distributed.new_group(backend="gloo", timeout=timeout)
                for timeout in (FOREVER, BRIEFLY)
            )

    @property
    def is_between(self) -> bool:
        """True if the last order succeeded in all processes, or failed in all of them."""
        return self._is_between

    def give(self, order: Mapping[str, Any]) -> None:
        """Send an order, a JSON object, from the main process.

        Raises:
            InputError: `process_lost`: a process has ended.
        """
        if self._num_processes > 1:
            self._exchange(self._patient, json.dumps(order).encode())

    def next(self) -> dict[str, Any]:
        """Wait for the next order from the main process.

        Raises:
            InputError: `process_lost`: the main process has ended.
        """
        order: dict[str, Any] = json.loads(self._exchange(self._patient, b"")[0])
        return order

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Carry out an order in this process.

        After an error in the user's data or settings, the processes check whether it occurred in
        all of them; if so, they can carry out other orders. After any other error, no order can be
        given.
        """
        self._is_between = False
        try:
            with lost_processes():
                yield
        except RolloutError as error:
            self._is_between = error.rule != "process_lost" and self._all_failed()
            raise
        self._is_between = True

    def _all_failed(self) -> bool:
        if self._num_processes == 1:
            return True
        try:
            self._exchange(self._brief, b"")
        except RolloutError:
            return False
        return True

    def _exchange(self, group: Any, data: bytes) -> list[bytes]:
        """Gather each process's bytes, ordered by rank."""
        was_between, self._is_between = self._is_between, False
        with lost_processes():
            # Sizes first, because all_gather needs tensors of one shape.
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self._num_processes)]
            distributed.all_gather(sizes, torch.tensor([len(data)]), group=group)
            padded = torch.zeros(max(1, *(int(size) for size in sizes)), dtype=torch.uint8)
            if data:
                padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            gathered = [torch.zeros_like(padded) for _ in sizes]
            distributed.all_gather(gathered, padded, group=group)
        # After an error it stays false: the processes may be at different places, and no order would meet.
        self._is_between = was_between
        return [
            part.numpy()[: int(size)].tobytes() for part, size in zip(gathered, sizes, strict=True)
        ]
