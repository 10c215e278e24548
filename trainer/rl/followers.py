"""Several processes in the loop: the main one samples and gives orders, and all train.

All processes load the models, and carry out the same methods of `Learning`. The data goes through
the dataset in the run's directory; each process reads a part of it, as in `rollouts train`.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import distributed

from schemas.errors import RolloutError, decode, encode
from trainer.distributed.processes import handling, lost_processes
from trainer.engine.colocated import VllmPart
from trainer.rl.learning import Learning
from trainer.run.resume import restore_generators

UPDATE, SAVE, WEIGHTS, ENGINE, STOP = "update", "save", "weights", "engine", "stop"
_LOGGER = getLogger(__name__)


@contextmanager
def leading(orders: Orders) -> Iterator[dict[str, Any]]:
    """End the other processes at the end of the block, with the same error if there is one.

    Yields:
        A dictionary that receives the fields of the run's result, which `follow` returns.
    """
    order: dict[str, Any] = {"do": STOP, "result": None}
    result = dict[str, Any]()
    try:
        yield result
        order["result"] = result or None
    except RolloutError as error:
        order["error"] = encode(error)
        raise
    finally:
        if orders.is_between:  # else the others notice that this process ends
            with suppress(RolloutError):
                orders.give(order)


def follow(learning: Learning, orders: Orders) -> dict[str, Any]:
    """Carry out the orders of the main process until the end of the run.

    Returns:
        The fields of the run's result.

    Raises:
        RolloutError: The main process ends the run with this error; `process_lost`: it has ended.
        KeyboardInterrupt: The main process was interrupted.
    """
    part = VllmPart(learning.training.model.path, learning.weights)
    # The main process responds to signals, after its micro-batch.
    with handling(signal.SIG_IGN, (signal.SIGINT, signal.SIGTERM)):
        while True:
            order = orders.next()
            if order["do"] == STOP:
                return _result_of(order)
            try:
                with orders.under_way():
                    _carry_out(learning, part, order)
            except RolloutError as error:
                if orders.is_between:
                    continue  # the main process has the same error, and decides what to do
                if error.rule != "process_lost":
                    _LOGGER.warning("%s", error)  # only this process has it
                raise


def _carry_out(learning: Learning, part: VllmPart, order: Mapping[str, Any]) -> None:
    if order["do"] == UPDATE:
        restore_generators(order["generators"])
        learning.update(Path(order["dataset"]), {}, None)
    elif order["do"] == ENGINE:
        getattr(part, order["method"])(**order["arguments"])
    elif order["do"] == SAVE:
        learning.save(None)
    else:
        assert order["do"] == WEIGHTS
        learning.write_weights(order["keep"], as_adapter=order["as_adapter"])


def _result_of(order: Mapping[str, Any]) -> dict[str, Any]:
    if "error" in order:
        raise decode(order["error"])
    if order["result"] is None:
        raise KeyboardInterrupt
    return dict(order["result"])


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

    Attributes:
        is_between: True if the last order succeeded in all processes, or failed in all of them.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._num_processes = accelerator.num_processes
        self.is_between = True
        if self._num_processes > 1:
            # Two groups, because gloo has one time limit a group.
            self._patient, self._brief = (
                distributed.new_group(backend="gloo", timeout=timeout)
                for timeout in (FOREVER, BRIEFLY)
            )

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
        self.is_between = False
        try:
            with lost_processes():
                yield
        except RolloutError as error:
            self.is_between = error.rule != "process_lost" and self._all_failed()
            raise
        self.is_between = True

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
        was_between, self.is_between = self.is_between, False
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
        self.is_between = was_between
        return [
            part.numpy()[: int(size)].tobytes() for part, size in zip(gathered, sizes, strict=True)
        ]
