"""Ask a vLLM server for the ids that truncated sampling kept at each token, and read them.

A server with `--logprobs-mode processed_logprobs` gives excluded tokens the log-probability -inf, and
normalises over the others. The most likely tokens are then the kept ones, if their probabilities sum
to 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from pipelines.generation.engines.base import Sampling
from schemas.metadata import LogprobsMode
from schemas.token_checks import LOGPROB_SENTINEL

MOST_LOGPROBS = 20
"""vLLM's default `--max-logprobs`; a larger number would be refused."""
_MISSING = 1e-3
"""Largest probability of kept tokens that may be missing from the answer."""
_NAMED = "token_id:"


class _Entry(msgspec.Struct):
    token: str
    logprob: float


class _Token(msgspec.Struct):
    top_logprobs: list[_Entry] = []


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    logprobs: _Logprobs


class _Answer(msgspec.Struct):
    choices: list[_Choice]


_ANSWER = msgspec.json.Decoder(_Answer)


def support_fields(
    sampling: Sampling, mode: LogprobsMode | None, *, is_chat: bool
) -> dict[str, Any]:
    """Return the fields of a request that ask for the kept ids; none if they cannot be had.

    Only a top-k bounds their number.
    """
    most = (sampling.top_k or MOST_LOGPROBS) + 1  # one more, because ties with the last are kept
    if mode != "processed" or not sampling.truncates or most > MOST_LOGPROBS + 1:
        return {}
    name = "top_logprobs" if is_chat else "logprobs"
    return {name: min(most, MOST_LOGPROBS), "return_tokens_as_token_ids": True}


def read_support(body: bytes, response_ids: Sequence[int]) -> list[list[int]] | None:
    """Return the kept ids at each token; None unless they are complete at every token."""
    logprobs = _ANSWER.decode(body).choices[0].logprobs
    if logprobs.content is not None:
        tokens = [{e.token: e.logprob for e in token.top_logprobs} for token in logprobs.content]
    else:
        tokens = [token or {} for token in logprobs.top_logprobs or ()]
    kept = [{n: p for n, p in token.items() if p > LOGPROB_SENTINEL} for token in tokens]
    if any(math.fsum(map(math.exp, token.values())) < 1 - _MISSING for token in kept):
        return None
    if not all(name.startswith(_NAMED) for token in kept for name in token):
        return None
    found = [[int(name.removeprefix(_NAMED)) for name in token] for token in kept]
    is_whole = len(found) == len(response_ids) and all(map(list.__contains__, found, response_ids))
    return found if is_whole else None
