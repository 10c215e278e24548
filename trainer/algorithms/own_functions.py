"""Call losses, reductions and advantage estimators, and check the results of the user's own."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from schemas.errors import InputError
from schemas.ragged import FloatArray
from trainer.algorithms.advantages import CriticAdvantages
from trainer.algorithms.losses import TokenLoss
from trainer.config.functions import LOSS_REDUCTION, POLICY_LOSS, Function


def call_function(function: Function, **inputs: Any) -> Any:
    """Call a function with its inputs, and its keys from the configuration.

    A user's function gets copies of its inputs, in case it modifies them, and is not called without
    targets, trajectories or tokens.

    Raises:
        InputError: `{rule_id}_raised`: the function raised an exception (the message has the
            location); `{rule_id}`: its result is invalid.
    """
    arguments = {**function.values, **inputs}
    if not function.is_own:
        return function.function(**arguments)
    sizes = (inputs[name] for name in function.kind.needs_one_of if name in inputs)
    size = next(value if isinstance(value, int) else len(value) for value in sizes)
    for name, array in inputs.items():
        copy = getattr(array, "clone", None) or getattr(array, "copy", None)
        inputs[name] = copy() if copy else array
    try:
        result = function.function(**arguments | inputs) if size else None
    except Exception as error:  # a user function may raise anything
        frames = traceback.extract_tb(error.__traceback__)[1:]
        path = function.location.rpartition(":")[0]
        frames = [frame for frame in frames if frame.filename == path] or frames
        place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        text = " ".join(str(error).split())[:300]
        finding = f"raised {type(error).__name__}: {text}".strip(": ") + place
        raise InputError(f"{function.kind.rule_id}_raised", function.name, finding) from error
    if function.kind is POLICY_LOSS:
        logprobs = arguments["logprobs"]
        is_clipped = torch.zeros_like(logprobs, dtype=torch.bool)
        result = result if size else TokenLoss(logprobs, is_clipped)
        return _checked_loss(function, result, logprobs)
    what = "weight of each target"
    if function.kind is not LOSS_REDUCTION:
        what = f"advantage of each {'trained token' if 'rewards' in inputs else 'trajectory'}"
    if "values" not in inputs:
        return _checked(function, result if size else [], size, what)
    result = result if size else CriticAdvantages(np.zeros(0), np.zeros(0))
    if not isinstance(result, CriticAdvantages):
        expected = "CriticAdvantages(advantages, value_targets), because it takes `values`"
        raise function.refused(f"a value of type {type(result).__name__}", expected)
    targets = _checked(function, result.value_targets, size, "value of each trained token")
    return CriticAdvantages(_checked(function, result.advantages, size, what), targets)


def _checked(function: Function, result: Any, num: int, what: str) -> FloatArray:
    """Convert a result (a NumPy array, a CPU tensor or a list of numbers) to [num] finite float64.

    Raises:
        InputError: The result is not numeric, has the wrong shape, or is not finite.
    """
    expected, kind = f"an array of {num} finite numbers with the {what}", type(result).__name__
    try:
        array = np.asarray(result)
    except Exception as error:  # such as a tensor on a GPU, or with gradient
        finding = f"a value of type {kind}, which NumPy cannot convert ({error})"
        raise function.refused(finding, expected) from None
    if array.dtype.kind not in "fiu":
        of = f" and dtype {array.dtype}" if isinstance(result, np.ndarray | list) else ""
        raise function.refused(f"a value of type {kind}{of}", expected)
    if array.shape != (num,):
        raise function.refused(f"shape {list(array.shape)}", expected)
    array = array.astype(np.float64)
    if not np.isfinite(array).all():
        first = int(np.argmin(np.isfinite(array)))
        raise function.refused(f"{array[first]} at element {first}", expected)
    return array


def _checked_loss(function: Function, result: Any, logprobs: Tensor) -> TokenLoss:
    """Check that a user's loss returned one finite number per target, with gradient."""
    parts: tuple[Any, Any, Any] = result if isinstance(result, TokenLoss) else (result, None, {})
    losses, clipped, metrics = parts
    if clipped is None:
        clipped = torch.zeros_like(logprobs, dtype=torch.bool)
    _check_tensor(function, "", losses, logprobs, logprobs.dtype)
    if logprobs.requires_grad and not losses.requires_grad:
        raise function.refused("losses without a gradient", "losses computed from `logprobs`")
    _check_tensor(function, "clipped", clipped, logprobs, torch.bool)
    if not isinstance(metrics, Mapping):
        finding = f"a value of type {type(metrics).__name__}"
        raise function.refused(finding, "a mapping from names to tensors", part="metrics")
    for name, values in metrics.items():
        _check_tensor(function, f"metrics[{name!r}]", values, logprobs)
    named = {f"policy_loss/{name}": values for name, values in metrics.items()}
    return TokenLoss(losses, clipped, named)


def _check_tensor(
    function: Function, part: str, values: Any, logprobs: Tensor, dtype: torch.dtype | None = None
) -> None:
    """Check that a part of a result is finite, with one element per target and of a dtype."""
    of = f"of shape [{len(logprobs)}]" + (f" and dtype {dtype}" if dtype else "")
    expected = f"a tensor {of}, one element per target"
    expected += "" if part else ", or a TokenLoss"
    if not isinstance(values, Tensor):
        raise function.refused(f"a value of type {type(values).__name__}", expected, part=part)
    fits = values.shape == logprobs.shape and (dtype is None or values.dtype == dtype)
    if not fits or values.device != logprobs.device:
        finding = f"a tensor of shape {list(values.shape)} and dtype {values.dtype}"
        if values.device != logprobs.device:
            finding, expected = f"{finding} on {values.device}", f"{expected}, on {logprobs.device}"
        is_reduced = not part and values.dim() == 0
        hint = (
            "return one loss per target; loss.reduction reduces the losses" if is_reduced else None
        )
        raise function.refused(finding, expected, hint, part=part)
    values, logprobs = values.detach(), logprobs.detach()
    if not values.isfinite().all():
        first = int(values.isfinite().logical_not().nonzero()[0])
        finding = f"{float(values[first])} at target {first}, whose log-probability is"
        finding += f" {float(logprobs[first]):.4g}"
        raise function.refused(finding, "finite numbers", part=part)
