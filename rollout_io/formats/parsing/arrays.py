"""Arrays of numbers in logs that are not JSON: lists, NumPy arrays and tensors, checked by their kind."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_LAST_ID = 2**31 - 1
_SHAPES = ("a number", "a flat list of numbers", "numbers [tokens, k]", "[tokens, layers, topk]")


class BrokenArray(Exception):
    """An array breaks a rule; the reader of a format knows where it stands."""

    def __init__(self, rule: str, got: str, expected: str) -> None:
        self.broken_rule, self.got, self.expected = rule, got, expected


class Numbers(NamedTuple):
    """What an array may hold.

    Attributes:
        kinds: Kinds of numbers, as NumPy names them.
        bounds: Smallest and largest value; if there are any, numbers are whole.
        rules: Rule that another type or shape breaks, and rule that another value breaks.
    """

    kinds: str
    dtype: Any
    bounds: tuple[int, int] | None = None
    num_dimensions: int = 1
    rules: tuple[str, str] = ("record_type", "token_range")

    def read(self, value: Any) -> npt.NDArray[Any]:
        """Return a value as an array of `dtype`; routing (3 dimensions) is not empty.

        Raises:
            BrokenArray: The value is no such array.
        """
        array, finding = array_of(value), ""
        is_empty = array.size == 0
        is_other = array.dtype.kind not in self.kinds and not is_empty
        if (
            "b" not in self.kinds
            and isinstance(value, list | tuple)
            and bool in {*map(type, value)}
        ):
            finding = "booleans"
        elif array.ndim != self.num_dimensions or is_other or (is_empty and array.ndim == 3):
            finding = "null" if value is None else f"{array.dtype} of shape {array.shape}"
        if finding:
            raise BrokenArray(self.rules[0], finding, _SHAPES[self.num_dimensions])
        if self.bounds is not None and not is_empty:
            low, high = self.bounds
            is_within = low <= array.min() <= array.max() <= high
            if not is_within or not np.array_equal(array, np.round(array)):
                finding = f"numbers in {array.min()}..{array.max()}"
                raise BrokenArray(self.rules[1], finding, f"whole numbers in {low}..{high}")
        with np.errstate(over="ignore"):  # overflow gives infinity, which the invariants reject
            return array.astype(self.dtype)


IDS = Numbers("iu", np.int32, (0, _LAST_ID))
MASK = Numbers("biuf", np.bool_, (0, 1), rules=("record_type", "record_type"))
LOGPROBS = Numbers("fiu", np.float32)
ROUTES = Numbers("iu", np.int16, (0, 2**15 - 1), 3, ("routing_shape", "routing_shape"))
SUPPORT = Numbers("iu", np.int64, (-1, _LAST_ID), 2)


def array_of(value: Any) -> npt.NDArray[Any]:
    """Return a value as an array; it has no dimension if it is none, such as lists of other lengths."""
    try:
        return np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
    except (ValueError, TypeError, OverflowError, RuntimeError, RecursionError):
        return np.asarray(None)
