"""The ids that truncated sampling kept at each token, from the most likely tokens of an answer.

A server with processed log-probabilities gives excluded tokens -inf (in JSON -9999), and normalises
over the others: the most likely tokens are the kept ones if their probabilities sum to 1. They are
named `token_id:N` if the request has `return_tokens_as_token_ids`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from rollout_io.formats.parsing.bodies import Logprobs, Sampling
from schemas.columns import LOGPROB_SENTINEL

MOST_LOGPROBS = 20
"""vLLM's default `--max-logprobs`; a larger number would be refused."""
_MISSING = 1e-3
"""Largest probability of kept tokens that may be missing from the answer."""
_NAMED = "token_id:"


class _Entry(msgspec.Struct):
    token: str
    logprob: float


_ENTRIES = msgspec.json.Decoder(list[_Entry])
_TABLE = msgspec.json.Decoder(dict[str, float])


def truncates(sampling: Sampling) -> bool:
    """Return true if a request draws from a part of the vocabulary by top_p, top_k or min_p.

    Temperature 0, where nothing is drawn, is no truncation.
    """
    is_cut = sampling.top_p is not None and sampling.top_p < 1
    is_cut = is_cut or (sampling.top_k or 0) > 0 or bool(sampling.min_p)
    return is_cut and sampling.temperature != 0


def num_to_ask(sampling: Sampling) -> int | None:
    """Return the number of most likely tokens that hold the kept ones; None if that is too many.

    Example:
        >>> [num_to_ask(Sampling(top_k=k)) for k in (3, 20, 21, None)]
        [4, 20, None, None]
        >>> num_to_ask(Sampling(top_p=0.9))
        20
    """
    top_k = max(sampling.top_k or 0, 0)
    if not truncates(sampling) or top_k > MOST_LOGPROBS:
        return None
    # One more than top_k, because ties with the last one are kept; only a top_k bounds the number.
    return min((top_k or MOST_LOGPROBS) + 1, MOST_LOGPROBS)


def read_support(logprobs: Logprobs | None, response_ids: Sequence[int]) -> list[list[int]] | None:
    """Return the kept ids at each token; None unless they are complete at every token.

    Example:
        >>> top = msgspec.Raw(b'{"token_id:7":-0.105,"token_id:5":-2.303,"token_id:6":-9999.0}')
        >>> read_support(Logprobs(top_logprobs=[top]), [5])
        [[7, 5]]
        >>> read_support(Logprobs(top_logprobs=[top]), [6]) is None
        True
    """
    if logprobs is None:
        return None
    try:
        if logprobs.content is not None:
            entries = [_ENTRIES.decode(token.top_logprobs) for token in logprobs.content]
            tokens = [{e.token: e.logprob for e in entry_list} for entry_list in entries]
        else:
            tokens = [_TABLE.decode(raw) for raw in logprobs.top_logprobs or ()]
        likely = [{_id_of(name): p for name, p in token.items()} for token in tokens]
        return complete_support(likely, response_ids)
    except (msgspec.MsgspecError, ValueError, OverflowError):
        return None


def complete_support(
    likely: Sequence[Mapping[int, float]], response_ids: Sequence[int]
) -> list[list[int]] | None:
    """Return the kept ids at each token from the log-probabilities of the most likely ones.

    None unless they are complete at every token.

    Example:
        >>> complete_support([{7: -0.105, 5: -2.303, 6: -math.inf}], [5])
        [[7, 5]]
        >>> complete_support([{7: -0.105}], [7]) is None
        True
    """
    possible = [{i: p for i, p in token.items() if p > LOGPROB_SENTINEL} for token in likely]
    if any(math.fsum(map(math.exp, token.values())) < 1 - _MISSING for token in possible):
        return None
    is_whole = len(possible) == len(response_ids) and all(
        map(dict.__contains__, possible, response_ids)
    )
    return [list(token) for token in possible] if is_whole else None


def _id_of(name: str) -> int:
    number = name.removeprefix(_NAMED)
    if number == name or not number.isdecimal():
        raise ValueError(name)
    return int(number)
