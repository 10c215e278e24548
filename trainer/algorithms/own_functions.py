"""Call user functions named by a configuration, and check their results."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.errors import InputError
from trainer.config.functions import Function

FloatArray = npt.NDArray[np.float64]


def call_own(function: Function, given: Mapping[str, Any]) -> Any:
    """Call a user's function with keyword arguments; arrays are copied in case it modifies them.

    Raises:
        InputError: `{key}_raised`: the function raised an exception (the message has the location).
    """
    given = {n: v.copy() if isinstance(v, np.ndarray) else v for n, v in given.items()}
    try:
        return function.call(**given)
    except Exception as error:  # a user function may raise anything
        frames = traceback.extract_tb(error.__traceback__)[1:]
        path = function.place.rpartition(":")[0]
        own = [frame for frame in frames if frame.filename == path] or frames
        place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
        text = " ".join(str(error).split())[:300]
        rule = f"{function.kind.key}_raised"
        got = f"raised {type(error).__name__}: {text}".strip(": ") + place
        raise InputError(rule, function.name, got) from error


def refused(
    function: Function, got: str, expected: str, hint: str | None = None, *, part: str = ""
) -> InputError:
    """Build the error for an invalid result of a user's function, or for `part` of the result."""
    where = f"{function.name}, {part}" if part else function.name
    return InputError(function.kind.key, where, got, expected, hint)


def finite_array(function: Function, found: Any, num: int, what: str) -> FloatArray:
    """Convert a function's result to [num] float64.

    Args:
        function: The function.
        found: The function's result: a NumPy array, a CPU tensor or a list of numbers.
        num: Required number of elements.
        what: Description of an element, for messages.

    Raises:
        InputError: The result is not numeric, has the wrong shape, or is not finite.
    """
    expected = f"an array of {num} finite numbers with the {what}"
    try:
        array = np.asarray(found)
    except Exception as error:  # such as a tensor on a GPU, or with gradient
        got = f"a value of type {type(found).__name__}, which NumPy cannot convert ({error})"
        raise refused(function, got, expected) from None
    if array.dtype.kind not in "fiu":
        got = f"a value of type {type(found).__name__}"
        got += f" and dtype {array.dtype}" if isinstance(found, np.ndarray | list) else ""
        raise refused(function, got, expected)
    if array.shape != (num,):
        raise refused(function, f"shape {list(array.shape)}", expected)
    array = array.astype(np.float64)
    if not np.isfinite(array).all():
        first = int(np.argmin(np.isfinite(array)))
        raise refused(function, f"{array[first]} at element {first}", expected)
    return array
