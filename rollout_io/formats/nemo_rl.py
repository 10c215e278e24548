"""The `nemo_rl` format: NeMo RL's message logs of NeMo Gym runs, one JSON document.

    {"expected_output": [{"message_log": [
        {"role": "user", "content": "", "token_ids": [...]},
        {"role": "assistant", "content": "", "token_ids": [...], "generation_logprobs": [...]}]}]}

Each element of `expected_output` (or of a list document) is a run. A message's `token_ids` are the
tokens that it adds to the context, so the prompt of a call consists of all ids before its answer;
only answers have log-probabilities. The document records no groups: each run is a separate
instance. A document with `seen_token_ids` and `output_prompt_token_ids` (a prompt as seen and as
rendered again) contains no run: it is recognized but rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Any

import msgspec

from rollout_io.formats.base import Options, Place, Run, Step, Trajectory
from rollout_io.formats.engines.records import Records, is_object_with
from rollout_io.formats.parsing.content import NO_JSON
from rollout_io.formats.parsing.tokens import logprob_array, token_ids
from schemas.errors import InputError

_HINT = "convert the rollouts of NeMo Gym, which have all ids (--format nemo_gym)"
_PAIR = ("seen_token_ids", "output_prompt_token_ids")
_LEAVES = {
    "texts and settings beside the tokens": "message_log.content input_message_log full_result"
}
_Logprob = Annotated[float, msgspec.Meta(ge=-1e38, le=1e38)]


class _Message(msgspec.Struct, gc=False):
    role: str
    token_ids: list[int] | None = None
    generation_logprobs: list[_Logprob] | None = None


class _Result(msgspec.Struct, gc=False):
    reward: float | None = None


class Logged(msgspec.Struct, gc=False):
    """A run, or two renderings of a prompt."""

    message_log: list[_Message] | None = None
    full_result: _Result | None = None
    seen_token_ids: msgspec.Raw = NO_JSON


def run_of(logged: Logged, place: Place) -> Run:
    """Return the run of a message log."""
    if logged.message_log is None:
        is_pair = bytes(logged.seen_token_ids) != b"null"
        finding = "the document has two renderings of a prompt, but no response"
        finding = finding if is_pair else "the record has no `message_log`"
        raise InputError("no_calls", place.where, finding)
    labels = {"file": place.where.rpartition(", ")[0] or place.where}
    return Run(instance_id=place.where, repetition_id=0, places=[place], labels=labels)


def read(logged: Logged, run: Run, _: Options) -> Trajectory:
    """Read the calls of a run, one per answer."""
    where, messages = run.places[0].where, logged.message_log or []
    ids = [_ids(m, f"{where}, message_log[{i}]") for i, m in enumerate(messages)]
    reward = None if logged.full_result is None else logged.full_result.reward
    return Trajectory(
        steps=[
            _step(message, ids[: i + 1], f"{where}, message_log[{i}]")
            for i, message in enumerate(messages)
            if message.role == "assistant"
        ],
        reward=reward,
        metrics={} if reward is None else {"reward": reward},
    )


def _ids(message: _Message, where: str) -> list[int]:
    if message.token_ids:
        return message.token_ids
    how = "no token ids" if message.token_ids is None else "an empty list of token ids"
    finding = f"the message of role {message.role!r} has {how}"
    raise InputError("no_token_ids", where, finding, hint=_HINT)


def _step(message: _Message, ids: Sequence[list[int]], where: str) -> Step:
    response = token_ids(ids[-1], "response", where)
    logprobs = None
    if message.generation_logprobs is not None:
        logprobs = logprob_array(message.generation_logprobs, len(response), where)
    return Step(
        source=where,
        prompt_token_ids=token_ids([*chain.from_iterable(ids[:-1])], "prompt", where),
        response_ids=response,
        rollout_logprobs=logprobs,
    )


_has_log, _is_pair = is_object_with(["message_log"]), is_object_with(_PAIR)


def _is_document(value: Any) -> bool:
    """True for message logs, or two renderings of a prompt."""
    runs = value.get("expected_output") if isinstance(value, dict) else value
    return _is_pair(value) or (isinstance(runs, list) and bool(runs) and all(map(_has_log, runs)))


ADAPTER = Records(
    records={"": Logged},
    leaves=_LEAVES,
    run=run_of,
    read=read,
    is_record=_is_document,
    is_whole=lambda _: True,
    elements="expected_output",
    groups="inferred: each run is a separate instance",
).adapter("NeMo RL's message logs with the engine's tokens: one JSON document", is_text=False)
