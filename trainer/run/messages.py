"""Show notes, warnings and progress to the person who started a run; see `trainer.run.warnings`.

An update forwards its tokens several times: the passes without gradient that a batch needs before
its first update, then the training passes. `Passes` shows which one runs, and how far it is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from typing import TYPE_CHECKING, NamedTuple

from rollout_io.terminal import Bar, Pace, duration
from trainer.batches.forest import Forest
from trainer.distributed.processes import is_main

if TYPE_CHECKING:
    from accelerate import Accelerator

    from trainer.config.train_config import TrainConfig


HIGHEST_LEARNING_RATE = 1e-2
"""Learning rate above which AdamW destroys a pretrained model, with or without LoRA."""
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
    rate, usual = config.learning_rate, config.usual_learning_rate
    weights = "of all weights" if config.model.lora_rank is None else "with LoRA"
    method = f"{'imitation' if config.loss.is_supervised else 'RL'} {weights}"
    if rate > HIGHEST_LEARNING_RATE:
        text = f"learning rate {rate:g} will probably destroy the model"
        warn(f"{text}; usual for {method}: {usual:g} (--lr {usual:g})")
    else:
        note = f"usual for {method}" if rate == usual else f"usual for {method}: {usual:g}"
        say(f"learning rate {rate:g} ({note})")


def say_attention(accelerator: Accelerator) -> None:
    """Log which attention packed rows use on a GPU, where one is many times faster."""
    if accelerator.device.type == "cuda":
        from trainer.models.varlen import packed_attention

        dtype = "float32" if accelerator.mixed_precision == "no" else "bfloat16"
        say(f"attention of packed rows, in {dtype}: {packed_attention(accelerator.device, dtype)}")


VALUES = "critic values"
OLD_LOGPROBS = "old log-probabilities"
REFERENCE = "reference log-probabilities"
SELECTION = "token selection"
TRAINING = "training"
CRITIC_TRAINING = "critic training"
TICK_S = 1.0
"""Time between two checks for a due progress line, in seconds."""


class Passes:
    """Counts the micro-batches of each pass of an update, and shows the progress.

    On a terminal, a row below the run's bar shows the pass that runs. Otherwise, a line is logged at
    most every 30 seconds, during a long micro-batch too (see `ticking`). Only this process's
    micro-batches are counted. Counting does not synchronise a device. Without a bar, as in all
    processes except the main one, nothing is shown.

    Args:
        bar: The bar of the run.
        num_planned: Maximum number of updates.
        num_made: Number of updates before this process started.
        moves: Whether updates also move the bar; otherwise, the run's log does.
        clock: Function that returns the time in seconds.
    """

    def __init__(
        self,
        bar: Bar | None = None,
        *,
        num_planned: int = 0,
        num_made: int = 0,
        moves: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bar, self._num_planned, self._num_made = bar, num_planned, num_made
        self._moves, self._clock, self._pace = moves, clock, Pace(clock=clock)
        # What runs, and since when; `tick` reads it in another thread, so it is replaced as a whole.
        self._now: tuple[str, float] | None = None

    def __call__(self, name: str, share: Sequence[Forest]) -> Iterator[Forest]:
        """Yield the micro-batches of a pass, and count them.

        `share` are this process's micro-batches, from `padded_forests`.
        """
        num_tokens, done_tokens = sum(forest.num_tokens for forest in share), 0
        began_s, bar = self._clock(), self._bar or Bar(0, "", shows=False)
        with bar.part(num_tokens, "tokens", name) as row:
            for index, forest in enumerate(share, start=1):
                tokens = f"{done_tokens:,} of {num_tokens:,} tokens done"
                if len(share) == 1:  # nothing is done before the end of the pass
                    tokens = f"{num_tokens:,} tokens"
                text = f"{name}, micro-batch {index} of {len(share)}, {tokens}"
                self._now = text, began_s
                self.tick()
                yield forest
                done_tokens += forest.num_tokens
                row.update(forest.num_tokens)
        self._now = None

    def end_update(self, *, stepped: int) -> None:
        """Count `stepped` updates as made: 0 for a mini-batch that was skipped."""
        self._num_made += stepped
        if self._moves and self._bar:
            self._bar.update(stepped)

    def tick(self) -> None:
        """Log a line if one is due; any thread may call this."""
        now = self._now
        if now is None or self._bar is None or self._bar.is_shown or not self._pace.is_due():
            return
        update = f"update {self._num_made + 1} of {self._num_planned}"
        say(f"{update}: {now[0]}, {duration(self._clock() - now[1])} elapsed")


@contextmanager
def ticking(passes: Passes) -> Iterator[None]:
    """Call `Passes.tick` regularly from a thread: on a CPU, one micro-batch can take minutes."""
    over = threading.Event()

    def tick() -> None:
        while not over.wait(TICK_S):
            passes.tick()

    in_context = copy_context().run  # so that -q applies in the thread as well
    thread = threading.Thread(target=in_context, args=(tick,), daemon=True, name="progress")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


UNWATCHED = Passes()
"""A `Passes` that shows no progress."""
