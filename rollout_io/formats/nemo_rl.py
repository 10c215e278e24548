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

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Annotated

import msgspec

from rollout_io.formats.base import (
    About,
    Adapter,
    Found,
    Input,
    Options,
    Place,
    Progress,
    Run,
    Step,
    Trajectory,
)
from rollout_io.formats.parsing.content import NO_JSON
from rollout_io.formats.parsing.documents import (
    decode_record,
    find_documents,
    parts_of,
)
from rollout_io.formats.parsing.jsonl import decode_document
from rollout_io.formats.parsing.tokens import logprob_array, token_ids
from rollout_io.formats.start import Start
from schemas.errors import InputError

_GROUPS = "inferred: each run is a separate instance"
_MARKS = (b'"message_log"', b'"seen_token_ids"')
_HINT = "convert the rollouts of NeMo Gym, which have all ids (--format nemo_gym)"


_Logprob = Annotated[float, msgspec.Meta(ge=-1e38, le=1e38)]


class _Message(msgspec.Struct, gc=False):
    role: str
    token_ids: list[int] | None = None
    generation_logprobs: list[_Logprob] | None = None


class _Result(msgspec.Struct, gc=False):
    reward: float | None = None


class _Logged(msgspec.Struct, gc=False):
    message_log: list[_Message]
    full_result: _Result | None = None


class _Runs(msgspec.Struct, gc=False):
    expected_output: list[msgspec.Raw]


class _Spoken(msgspec.Struct, gc=False):
    role: str


class _LoggedShape(msgspec.Struct, gc=False):
    message_log: list[_Spoken]


class _RunsShape(msgspec.Struct, gc=False):
    expected_output: list[_LoggedShape]


class _PairShape(msgspec.Struct, gc=False):
    seen_token_ids: list[int]
    output_prompt_token_ids: list[int]


class _Keys(msgspec.Struct, gc=False):
    seen_token_ids: msgspec.Raw = NO_JSON


_RUN_DECODER = msgspec.json.Decoder(_Logged)
_DOCUMENT_DECODER = msgspec.json.Decoder(_Runs | list[msgspec.Raw])
_RUNS_SHAPE_DECODER = msgspec.json.Decoder(_RunsShape | list[_LoggedShape])
_PAIR_SHAPE_DECODER = msgspec.json.Decoder(_PairShape)
_KEYS_DECODER = msgspec.json.Decoder(_Keys | list[msgspec.Raw])


def find_runs(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Yield one run per element, in the order of the documents."""
    yield About("groups", _GROUPS)
    yield from find_documents(inputs, progress, _find)


def _find(place: Place, document: bytes) -> Iterator[Run]:
    keys = decode_document(_KEYS_DECODER, document, place.where)
    if isinstance(keys, _Keys) and bytes(keys.seen_token_ids) != b"null":
        got = "the document has two renderings of a prompt, but no response"
        raise InputError("no_calls", place.where, got)
    found = decode_document(_DOCUMENT_DECODER, document, place.where)
    name, parts = "[]", found
    if isinstance(found, _Runs):
        name, parts = "expected_output", found.expected_output
    for part in parts_of(place, document, name, parts):
        labels = {"file": place.where}
        yield Run(instance_id=part.where, repetition_id=0, places=[part], labels=labels)


def read_run(run: Run, _: Options) -> Trajectory:
    """Read the calls of a run, one per answer.

    Raises:
        RolloutError: `no_calls`: the run has no model response; `no_token_ids`: a message has no
            ids; or the tokens break an invariant (`lengths_align`, ...).
    """
    (place,) = run.places
    logged = decode_record(_RUN_DECODER, place)
    ids = [_ids(m, f"{place.where}, message_log[{i}]") for i, m in enumerate(logged.message_log)]
    answers = [i for i, m in enumerate(logged.message_log) if m.role == "assistant"]
    if not answers:
        raise InputError("no_calls", place.where, "the run has no model response")
    reward = None if logged.full_result is None else logged.full_result.reward
    return Trajectory(
        steps=[
            _step(logged.message_log[i], ids[: i + 1], f"{place.where}, message_log[{i}]")
            for i in answers
        ],
        reward=reward,
        metrics={} if reward is None else {"reward": reward},
    )


def _ids(message: _Message, where: str) -> list[int]:
    if message.token_ids:
        return message.token_ids
    how = "no token ids" if message.token_ids is None else "an empty list of token ids"
    got = f"the message of role {message.role!r} has {how}"
    raise InputError("no_token_ids", where, got, hint=_HINT)


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


def recognizes(start: Start) -> bool:
    """True if a file is a JSON document with message logs, or with two renderings of a prompt."""
    is_runs = start.is_document_of(_RUNS_SHAPE_DECODER, _MARKS)
    return is_runs or start.is_document_of(_PAIR_SHAPE_DECODER, _MARKS)


ADAPTER = Adapter(
    summary="NeMo RL's message logs with the engine's tokens: one JSON document",
    recognizes=recognizes,
    find=find_runs,
    read=read_run,
)
