"""Token ids, log-probabilities and routes as logs hold them: checked, then arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from rollout_io.adapters import Step
from schemas.errors import RolloutError
from schemas.row_checks import LOGPROB_SENTINEL
from schemas.rules import RULES

INT32_MAX = 2**31 - 1

_Expert = Annotated[int, msgspec.Meta(ge=0, le=2**15 - 1)]
_ROUTES_DECODER = msgspec.json.Decoder(list[list[list[_Expert]]] | None)


def broken(rule: str, where: str, got: str, expected: str) -> RolloutError:
    """The error of a named invariant, with its hint."""
    return RolloutError(rule, where, got, expected, RULES[rule].hint)


def token_ids(ids: Sequence[int], what: str, where: str) -> npt.NDArray[np.int32]:
    """The ids of a prompt or response, [tokens] int32.

    Args:
        ids: As logged.
        what: `prompt` or `response`.
        where: Place of the call.

    Raises:
        RolloutError: nonempty_prompt, nonempty_response, token_range.
    """
    if not ids:
        raise broken(f"nonempty_{what}", where, f"a {what} of 0 tokens", "at least 1 token")
    if not 0 <= min(ids) <= max(ids) <= INT32_MAX:
        bad = next(i for i in ids if not 0 <= i <= INT32_MAX)
        raise broken("token_range", where, f"id {bad} in the {what}", f"ids in 0..{INT32_MAX}")
    return np.array(ids, np.int32)


def logprob_array(values: Sequence[float], num_tokens: int, where: str) -> npt.NDArray[np.float32]:
    """Log-probabilities of a response, [tokens] float32 nats; 0.0 is a real one.

    Raises:
        RolloutError: lengths_align, logprobs_finite, logprobs_nonpositive.
    """
    if len(values) != num_tokens:
        got = f"{len(values)} log-probabilities for {num_tokens} response tokens"
        raise broken("lengths_align", where, got, "one per token")
    if values and min(values) <= LOGPROB_SENTINEL:
        raise broken("logprobs_finite", where, f"logprob {min(values)}", "values above -9999")
    if values and max(values) > 0:
        raise broken("logprobs_nonpositive", where, f"logprob {max(values)}", "at most 0")
    return np.array(values, np.float32)


def route_array(raw: msgspec.Raw, num_tokens: int, place: str) -> npt.NDArray[np.int16] | None:
    """Routed experts, [tokens, layers, topk] int16, of a leading part of prompt + response.

    Args:
        raw: JSON of nested lists, or null.
        num_tokens: Tokens of prompt + response.
        place: Place of the field.

    Raises:
        RolloutError: routing_shape.
    """
    expected = "nested lists [tokens][layers][topk] of experts 0..32767"
    try:
        nested = _ROUTES_DECODER.decode(raw)
        routes = None if nested is None else np.array(nested, np.int16)
    except msgspec.ValidationError as error:
        raise broken("routing_shape", place, str(error), expected) from None
    except ValueError:
        raise broken("routing_shape", place, "lists of unequal lengths", expected) from None
    if routes is None:
        return None
    if routes.ndim != 3 or 0 in routes.shape or len(routes) > num_tokens:
        got, expected = f"shape {routes.shape}", f"[1..{num_tokens} tokens][layers][topk]"
        raise broken("routing_shape", place, got, expected)
    return routes


def one_routing(
    steps: Iterable[Step], known: tuple[int, int] | None, where: str
) -> tuple[int, int] | None:
    """(layers, topk) of the steps' routes, which one model's log has one of.

    Raises:
        RolloutError: routing_shape: it differs from `known`.
    """
    for step in steps:
        if step.rollout_expert_indices is not None:
            _, num_layers, topk = step.rollout_expert_indices.shape
            if known not in {None, (num_layers, topk)}:
                got, expected = f"{num_layers} layers, top {topk}", f"{known}, as in earlier calls"
                raise broken("routing_shape", where, got, expected)
            known = (num_layers, topk)
    return known
