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

from typing import Any

import msgspec

from rollout_io.formats.base import Conversation, Options, Place, Run, Trajectory, note
from rollout_io.formats.dialects import responses
from rollout_io.formats.engines.records import Records, is_object_with
from rollout_io.formats.grammar import account
from rollout_io.formats.parsing.content import Message
from rollout_io.formats.parsing.messages import prompt_key

NO_SYSTEM = "runs whose instructions and tools are not logged"
_LEAVES = {
    "repeats the item": "generated_items.type generated_items.agent generated_items.output "
    "generated_items.tool_name generated_items.source_agent generated_items.target_agent",
    "repeats the generated items": "model_responses last_model_response session_items "
    "last_processed_response",
    "the program's own state": "$schemaVersion current_agent context current_step tool_use_tracker "
    "trace max_turns current_turn input_guardrail_results output_guardrail_results "
    "tool_input_guardrail_results tool_output_guardrail_results generated_prompt_cache_key "
    "conversation_id previous_response_id reasoning_item_id_policy "
    "nested_history_owned_session_item_refs generated_session_item_indexes sandbox "
    "no_active_agent_run",
}


class _Named(msgspec.Struct, gc=False):
    name: str | None = None


class _Generated(msgspec.Struct, gc=False):
    raw_item: dict[str, Any] | None = None


class _State(msgspec.Struct, gc=False):
    original_input: str | list[dict[str, Any]]
    generated_items: list[_Generated]
    current_agent: _Named | None = None


def _input(state: _State, where: str) -> list[Message]:
    prompt = state.original_input
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return responses.messages(prompt, f"{where}, original_input")


def run_of(state: _State, place: Place) -> Run:
    """Return the run of a state; runs with the same input form a group."""
    key = prompt_key(_input(state, place.where))
    name = state.current_agent.name if state.current_agent else None
    labels = {"prompt": key} | ({"agent": name} if name else {})
    return Run(instance_id=key, repetition_id=None, places=[place], labels=labels)


def read(state: _State, run: Run, _: Options) -> Trajectory:
    """Read the conversation of a state."""
    where = run.places[0].where
    prompt = _input(state, where)
    items = [item.raw_item for item in state.generated_items if item.raw_item]
    account(responses.ITEMS, items, "generated_items")
    messages = [*prompt, *responses.messages(items, f"{where}, generated_items", prompt)]
    note(NO_SYSTEM)
    step = Conversation(
        source=where,
        messages=messages,
        num_given=len(prompt),
        agent=run.labels.get("agent"),
    )
    return Trajectory(steps=[step])


ADAPTER = Records(
    records={"": _State},
    leaves=_LEAVES,
    run=run_of,
    read=read,
    is_record=is_object_with(
        ["$schemaVersion", "original_input", "generated_items", "model_responses"]
    ),
    groups="inferred: runs with the same input",
).adapter("states of runs of OpenAI's Agents SDK (RunState), one JSON document each")
