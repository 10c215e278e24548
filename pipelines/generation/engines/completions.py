"""Completions of OpenAI-compatible servers: fields of requests, and checked responses, without guesses."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from pipelines.generation.engines.base import Sampled, Sampling, contains_any
from rollout_io.formats.base import Step
from rollout_io.formats.parsing import bodies
from rollout_io.formats.parsing.bodies import Request, Response
from rollout_io.formats.parsing.completions import read_choices
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.tokens import logprob_array, strict_ids, token_ids, usage_differs
from schemas.errors import EngineError, RolloutError
from schemas.metadata import LogprobsMode

_ANSWER = msgspec.json.Decoder(bodies.Response)

_RESPONSE = msgspec.json.Decoder(Response)
_ABORTED = "abort"
_KEPT = ("role", "content", "tool_calls", "reasoning", "reasoning_content")


def sampling_fields(sampling: Sampling, special_tokens: Collection[str] = ()) -> dict[str, Any]:
    """Return a request's sampling fields, all explicit so that no server defaults apply.

    Args:
        sampling: Sampling settings.
        special_tokens: See `VllmEngine`.
    """
    fields: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": -1 if sampling.top_k is None else sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "max_tokens": sampling.max_tokens,
        "return_token_ids": True,
    }
    if sampling.stop:
        fields |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
    if contains_any(sampling.stop, special_tokens):
        fields["skip_special_tokens"] = False
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    return fields


def support_fields(
    sampling: Sampling | bodies.Sampling, mode: LogprobsMode | None, *, is_chat: bool
) -> dict[str, Any]:
    """Return the fields of a request that ask for the kept ids; none if they cannot be had."""
    if isinstance(sampling, Sampling):
        names = ("temperature", "top_p", "top_k", "min_p")
        sampling = bodies.Sampling(**{name: getattr(sampling, name) for name in names})
    most = bodies.num_to_ask(sampling) if mode == "processed" else None
    if most is None:
        return {}
    name = "top_logprobs" if is_chat else "logprobs"
    return {name: most, "return_tokens_as_token_ids": True}


def read_support(body: bytes, response_ids: Sequence[int]) -> list[list[int]] | None:
    """Return the kept ids at each token; None unless they are complete at every token."""
    return bodies.read_support(_ANSWER.decode(body).choices[0].logprobs, response_ids)


def read_sampled(
    body: bytes, where: str, *, policy_version: int, sent: Sequence[int] | None = None
) -> Sampled | None:
    """Parse a response that has a single choice; None if the engine aborted it.

    Args:
        body: JSON of a chat or text completion.
        where: Location of the call, shown in error messages.
        policy_version: Version of the weights when the response was started.
        sent: Ids of the prompt, if it was sent as ids: the response must report the same ids.

    Raises:
        EngineError: `engine_answer`: data is missing or inconsistent.
    """
    with engine_answers(where):
        response = decode_line(_RESPONSE, body, where)
        if any(choice.finish_reason == _ABORTED for choice in response.choices):
            return None
        steps = read_choices(response, Request(), where)
        return _sampled(steps, body, where, policy_version, sent)


@contextmanager
def engine_answers(where: str) -> Iterator[None]:
    """Raise any error about the engine's data as `engine_answer`."""
    try:
        yield
    except RolloutError as error:
        if error.rule == "engine_answer":
            raise
        finding = f"{error.got} ({error.rule})"
        hint = error.hint if error.rule == "no_token_ids" else None
        message = f"{error.sentence.removesuffix('.')} ({error.rule})"
        raise EngineError(
            "engine_answer", where, finding, error.expected, hint, message=message
        ) from None


def _sampled(
    steps: Sequence[Step], body: bytes, where: str, policy_version: int, sent: Sequence[int] | None
) -> Sampled:
    if len(steps) != 1:
        raise EngineError("engine_answer", where, f"{len(steps)} choices", "1")
    step = steps[0]
    prompt = _ids(step.prompt_token_ids, "prompt", where)
    response = _ids(step.response_ids, "response", where)
    if sent is not None and prompt != list(sent):
        finding = (
            f"the engine's {len(prompt)} prompt ids differ from the {len(sent)} that were sent"
        )
        raise EngineError("engine_answer", where, finding)
    for what, ids, number in zip(
        ("prompt", "response"), (prompt, response), step.num_counted, strict=True
    ):
        if number not in {None, len(ids)}:
            raise usage_differs(what, len(ids), number or 0, where)
    if step.rollout_logprobs is None:
        finding, hint = (
            "the response has no log-probabilities",
            "use a server that supports `logprobs`",
        )
        raise EngineError("engine_answer", where, finding, hint=hint)
    if step.stop_reason is None:
        raise EngineError("engine_answer", where, "the response has no finish_reason")
    logprobs = logprob_array(step.rollout_logprobs.tolist(), len(response), where)
    return Sampled(
        prompt_token_ids=prompt,
        response_ids=response,
        rollout_logprobs=logprobs.tolist(),
        stop_reason=step.stop_reason,
        text=step.response_text or "",
        policy_version=policy_version,
        message=_message(body),
        rollout_expert_indices=step.rollout_expert_indices,
    )


def _ids(ids: Any, what: str, where: str) -> list[int]:
    found = strict_ids(ids, what, where) if isinstance(ids, bytes) else np.asarray(ids)
    checked: list[int] = token_ids(found.tolist(), what, where).tolist()
    return checked


def _message(body: bytes) -> dict[str, Any] | None:
    message = msgspec.json.decode(body)["choices"][0].get("message")
    if message is None:
        return None
    kept = {name: message[name] for name in _KEPT if message.get(name)}
    return {"role": "assistant", "content": message.get("content")} | kept
