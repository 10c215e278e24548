"""The training half of the loop in several processes: the main one leads, the others follow.

The main process samples, evaluates, audits and logs. For updates, checkpoints and weights it gives
an order, which all processes carry out together. The order of an update names the iteration's
dataset in the run's directory; each process reads a part of this dataset, as in `rollouts train`.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from logging import getLogger
from pathlib import Path
from typing import Any, Self, TypeVar

from schemas.errors import RolloutError, decode, encode
from trainer.distributed.orders import Orders
from trainer.rl.updates import Learning
from trainer.run.run_log import RunLog
from trainer.run.state import generators, restore_generators

T = TypeVar("T")
UPDATE, SAVE, WEIGHTS, STOP = "update", "save", "weights", "stop"
_LOGGER = getLogger(__name__)


class Together:
    """Runs methods of `Learning` in all processes; only the main process uses this object.

    Leaving the `with` block ends the other processes, with the same error if there is one.

    Args:
        learning: The state of training in this process.
        orders: Connection to the other processes.
    """

    def __init__(self, learning: Learning, orders: Orders) -> None:
        self._learning, self._orders = learning, orders
        self._result: Mapping[str, Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not self._orders.is_between:
            return  # the others notice that this process ends
        order: dict[str, Any] = {"do": STOP, "result": self._result}
        if isinstance(error, RolloutError):
            order["error"] = encode(error)
        with suppress(RolloutError):
            self._orders.give(order)

    def end_with(self, result: Mapping[str, Any]) -> None:
        """Set the fields of the run's result, which `follow` returns in the other processes."""
        self._result = result

    def update(self, dataset: Path, numbers: dict[str, Any], log: RunLog) -> list[dict[str, Any]]:
        """See `Learning.update`."""
        # Environments and engines may have drawn from the generators of the main process.
        order = {"do": UPDATE, "dataset": str(dataset), "generators": generators()}
        return self._in_all(order, lambda: self._learning.update(dataset, numbers, log))

    def save(self, log: RunLog) -> Path:
        """See `Learning.save`."""
        return self._in_all({"do": SAVE}, lambda: self._learning.save(log))

    def write_weights(self, keep: int, *, as_adapter: bool) -> Path:
        """See `Learning.write_weights`."""
        how: Any = {"keep": keep, "as_adapter": as_adapter}
        return self._in_all({"do": WEIGHTS} | how, lambda: self._learning.write_weights(**how))

    @contextmanager
    def saved_when_it_ends(self, log: RunLog) -> Iterator[None]:
        """Save the progress if an error or a signal ends the run between two iterations."""
        try:
            yield
        except (RolloutError, asyncio.CancelledError):
            if self._learning.has_unsaved_iterations and self._orders.is_between:
                self.save(log)
            raise

    def _in_all(self, order: Mapping[str, Any], work: Callable[[], T]) -> T:
        self._orders.give(order)
        with self._orders.under_way():
            return work()


def follow(learning: Learning, orders: Orders) -> dict[str, Any]:
    """Carry out the orders of the main process until the end of the run.

    Returns:
        The fields of the run's result.

    Raises:
        RolloutError: The main process ends the run with this error; `process_lost`: it has ended.
        KeyboardInterrupt: The main process was interrupted.
    """
    with _stopped_by_main():
        while True:
            order = orders.next()
            if order["do"] == STOP:
                return _result_of(order)
            try:
                with orders.under_way():
                    _carry_out(learning, order)
            except RolloutError as error:
                if orders.is_between:
                    continue  # the main process has the same error, and decides what to do
                if error.rule != "process_lost":
                    _LOGGER.warning("%s", error)  # only this process has it
                raise


def _carry_out(learning: Learning, order: Mapping[str, Any]) -> None:
    if order["do"] == UPDATE:
        restore_generators(order["generators"])
        learning.update(Path(order["dataset"]), {}, None)
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


@contextmanager
def _stopped_by_main() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM, to which the main process responds after its micro-batch."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = signal.SIGINT, signal.SIGTERM
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
