"""Several processes in the loop: the main one samples and gives orders, and all train.

All processes load the models, and carry out the same methods of `Learning`. The data goes through
the dataset in the run's directory; each process reads a part of it, as in `rollouts train`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from logging import getLogger
from pathlib import Path
from typing import Any

from schemas.errors import RolloutError, decode, encode
from trainer.distributed.orders import Orders
from trainer.engine.vllm_part import VllmPart
from trainer.rl.learning import Learning
from trainer.run.state import restore_generators

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
    with _stopped_by_main():
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
