"""Statistics of numbers that the processes of a run hold together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Literal

import numpy as np
from accelerate import Accelerator
from torch import Tensor

from trainer.distributed.processes import over_processes

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
        found = np.zeros(len(ranks), np.uint64)
        for shift in range(_BITS - _DIGIT, -1, -_DIGIT):
            digits = np.arange(1 << _DIGIT, dtype=np.uint64) << np.uint64(shift)
            last = np.uint64((1 << shift) - 1)
            starts = np.searchsorted(bits, found[:, None] + digits, side="left")
            ends = np.searchsorted(bits, found[:, None] + digits + last, side="right")
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
            found = found + digits[digit]
        low, high = found.view(np.float64).reshape(2, -1)
        return [float(x) for x in low + (high - low) * (at - np.floor(at))]
