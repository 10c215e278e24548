"""The `openai_agents` format: states of runs that OpenAI's Agents SDK saved (`RunState`).

    {"$schemaVersion": "1.17", "current_agent": {"name": "..."}, "original_input": "...",
     "model_responses": [{"output": [...], "response_id": "..."}],
     "generated_items": [{"type": "tool_call_item", "agent": {"name": "..."}, "raw_item": {...}}]}

A state is a run with one conversation: the input, then the items that were generated. Calls and
results are items of OpenAI's Responses API. The state holds neither the agent's instructions nor its
tools, which is counted, and no reward. A state that refers to messages on OpenAI's servers
(`previous_response_id` with an input that lacks them) is read as far as it goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollout_io.formats.base import (
    About,
    Adapter,
    Conversation,
    Found,
    Input,
    Options,
    Progress,
    Run,
    Trajectory,
)
from rollout_io.formats.contents import Contents, account
from rollout_io.formats.dialects import responses
from rollout_io.formats.parsing.content import Message
from rollout_io.formats.parsing.lines import Record, read_record
from rollout_io.formats.parsing.messages import prompt_key
from rollout_io.formats.parsing.notes import note
from rollout_io.formats.parsing.records import decode_record, find_records, first_values
from schemas.errors import InputError

_GROUPS = "inferred: runs with the same input"
NO_SYSTEM = "runs whose instructions and tools are not logged"
_ITEM = Contents(
    reads={"": "type agent raw_item"},
    leaves={"repeats the item": "output tool_name source_agent target_agent"},
)
CONTENTS = Contents(
    reads={"": "$schemaVersion current_agent original_input generated_items"},
    leaves={
        "repeats the generated items": "model_responses last_model_response session_items "
        "last_processed_response",
        "the program's own state": "context current_step tool_use_tracker trace max_turns "
        "current_turn input_guardrail_results output_guardrail_results "
        "tool_input_guardrail_results tool_output_guardrail_results generated_prompt_cache_key "
        "conversation_id previous_response_id reasoning_item_id_policy "
        "nested_history_owned_session_item_refs generated_session_item_indexes sandbox",
    },
    inner={"generated_items": _ITEM},
)


class _Named(msgspec.Struct, gc=False):
    name: str | None = None


class _Generated(msgspec.Struct, gc=False):
    raw_item: dict[str, Any] | None = None


class _State(msgspec.Struct, gc=False):
    original_input: str | list[dict[str, Any]]
    generated_items: list[_Generated]
    current_agent: _Named | None = None


_DECODER = msgspec.json.Decoder(_State)


def find_states(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Yield one run per state; runs with the same input form a group."""
    yield About("groups", _GROUPS)
    yield from find_records(inputs, progress, _find)


def _find(record: Record) -> Iterator[Found]:
    state = decode_record(record, _DECODER)
    key = prompt_key(_input(state, record.place.where))
    name = state.current_agent.name if state.current_agent else None
    labels = {"prompt": key} | ({"agent": name} if name else {})
    yield Run(instance_id=key, repetition_id=None, places=[record.place], labels=labels)


def _input(state: _State, where: str) -> list[Message]:
    given = state.original_input
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return responses.messages(given, f"{where}, original_input")


def read_state(run: Run, _: Options) -> Trajectory:
    """Read the conversation of a state.

    Raises:
        InputError: `no_calls`: nothing was generated; `message`: an item is invalid.
    """
    (place,) = run.places
    content = read_record(place)
    account(CONTENTS, content)
    state = decode_record(Record(place, content), _DECODER)
    given = _input(state, place.where)
    items = [each.raw_item for each in state.generated_items if each.raw_item]
    account(responses.ITEMS, items, "generated_items")
    made = responses.messages(items, f"{place.where}, generated_items", given)
    messages = [*given, *made]
    if all(message["role"] != "assistant" for message in made):
        raise InputError("no_calls", place.where, "the state has no generated answer")
    note(NO_SYSTEM)
    step = Conversation(
        source=place.where,
        messages=messages,
        num_given=len(given),
        agent=run.labels.get("agent"),
    )
    return Trajectory(steps=[step])


def recognizes(path: Path) -> bool:
    """True if a file is a state: it has the input and the generated items."""
    return any(_is_state(value) for value in first_values(path))


def _is_state(value: Any) -> bool:
    names = {"$schemaVersion", "original_input", "generated_items", "model_responses"}
    return isinstance(value, Mapping) and names <= value.keys()


ADAPTER = Adapter(
    summary="states of runs of OpenAI's Agents SDK (RunState), one JSON document each",
    recognizes=recognizes,
    find=find_states,
    read=read_state,
    is_text=True,
    contents=CONTENTS,
)
