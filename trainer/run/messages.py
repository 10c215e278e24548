"""Notes and warnings about a run, for the person who started it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from trainer.config.learning_rate import described
from trainer.distributed.processes import is_main

if TYPE_CHECKING:
    from accelerate import Accelerator

    from trainer.config.train_config import TrainConfig

_LOGGER = logging.getLogger(__name__)


class Remark(NamedTuple):
    """A note or warning about a run.

    Attributes:
        text: The message, without the prefix "warning: ".
        level: `logging.INFO` or `logging.WARNING`.
    """

    text: str
    level: int = logging.INFO


def say(text: str) -> None:
    """Log a note in the main process; commands show it on stderr."""
    show(Remark(text))


def warn(text: str) -> None:
    """Log a warning in the main process; commands show it on stderr after "warning: "."""
    show(Remark(text, logging.WARNING))


def show(remark: Remark) -> None:
    """Log a remark in the main process."""
    if is_main():
        _LOGGER.log(remark.level, "%s", remark.text)


def say_learning_rate(config: TrainConfig) -> None:
    """Log the learning rate, and the usual one of the method; warn if it is far too high."""
    show(Remark(*described(config.learning_rate, **config.method)))


def say_attention(accelerator: Accelerator) -> None:
    """Log which attention packed rows use on a GPU, where one is many times faster."""
    if accelerator.device.type == "cuda":
        from trainer.models.varlen import packed_attention

        dtype = "float32" if accelerator.mixed_precision == "no" else "bfloat16"
        say(f"attention of packed rows, in {dtype}: {packed_attention(accelerator.device, dtype)}")
