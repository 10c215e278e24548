"""The formats `smolagents` and `openai_agents`: runs as two frameworks for agents save them.

The format `smolagents` is the memory of an agent of smolagents, one JSON list per run.
`agent.memory.get_full_steps()` returns the list. Each step with an answer is a call, whose prompt are its
input messages. As smolagents does before it calls a model, the roles `tool-call` and `tool-response`
become `assistant` and `user`, and consecutive messages of one role are joined. Steps whose answer was not
kept are counted. The log has no reward and no tool definitions.

The format `openai_agents` is states of runs that OpenAI's Agents SDK saved (`RunState`).
A state is a run with one conversation: the input, then the items that were generated. Calls and
results are items of OpenAI's Responses API. The state holds neither the agent's instructions nor its
tools, which is counted, and no reward. A state that refers to messages on OpenAI's servers
(`previous_response_id` with an input that lacks them) is read as far as it goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from rollout_io.formats.base import Conversation, Options, Place, Run, Trajectory, note
from rollout_io.formats.dialects import frameworks, responses
from rollout_io.formats.dialects.bodies import answers_of, response_with_tokens
from rollout_io.formats.engines.records import Records
from rollout_io.formats.grammar import Contents, account, inner, like
from rollout_io.formats.parsing.content import Message
from rollout_io.formats.parsing.messages import prompt_key
from rollout_io.formats.parsing.model_calls import Call, steps_of
from rollout_io.formats.requests import Piece, Sends, sent

_ROLES = {"tool-call": "assistant", "tool-response": "user"}
_SENDS = Sends(dict.fromkeys(("system", "user", "assistant"), "\n"))
NO_ANSWER = "steps without the model's messages: left out"
_MESSAGE = Contents(
    reads={"": "role content tool_calls"}, leaves={"repeats the message": "raw token_usage"}
)
_LEAVES = {
    "is in the next prompt": "observations observations_images task_images action_output "
    "code_action tool_calls error plan system_prompt",
    "repeats the answer": "model_output",
    "facts about the step": "timing token_usage is_final_answer",
}
_Messages = Annotated[list[dict[str, Any]] | None, inner(_MESSAGE)]


class Step(msgspec.Struct, gc=False):
    """A step of a run: a call of the model, or a plan."""

    task: str | None = None
    step_number: int | None = None
    model_input_messages: _Messages = None
    model_output_message: Annotated[dict[str, Any] | None, inner(_MESSAGE)] = None


def run_of(steps: list[Step], place: Place) -> Run:
    """Return the run in a list of steps; runs of the same task form a group."""
    key = prompt_key(next((step.task for step in steps if step.task), ""))
    return Run(instance_id=key, repetition_id=None, places=[place], labels={"prompt": key})


def read(steps: list[Step], run: Run, _: Options) -> Trajectory:
    """Read the model calls of a run."""
    calls: list[Call] = []
    place = run.places[0].where
    for i, step in enumerate(steps):
        prompt, answer = step.model_input_messages, step.model_output_message
        if prompt and answer:
            where = f"{place}[{i}]"
            logged = map(Piece, frameworks.messages([*map(_cleaned, prompt)], where))
            messages = [piece.message for piece in sent(logged, _SENDS, set())]
            raw = response_with_tokens(answer.pop("raw", None))
            replies = answers_of(answer, where)
            calls += [Call(where=where, prompt=messages, reply=r, answer=raw) for r in replies]
        elif step.step_number is not None:
            note(NO_ANSWER)
    return Trajectory(steps=steps_of(calls, place, failed=run.failed))


def _cleaned(message: Mapping[str, Any]) -> dict[str, Any]:
    role = str(message.get("role"))
    fields = {"role": _ROLES.get(role, role), "content": message.get("content")}
    return fields | ({"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {})


_is_step = like("step_number model_input_messages")
SMOLAGENTS = Records(
    records={"": list[Step]},
    leaves=_LEAVES,
    run=run_of,
    read=read,
    is_record=lambda value: isinstance(value, list) and any(map(_is_step, value)),
    groups="inferred: runs of the same task",
).adapter("the memory of agents of smolagents, one JSON list per run")


NO_SYSTEM = "runs whose instructions and tools are not logged"
_STATE_LEAVES = {
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


def run_of_state(state: _State, place: Place) -> Run:
    """Return the run of a state; runs with the same input form a group."""
    key = prompt_key(_input(state, place.where))
    name = state.current_agent.name if state.current_agent else None
    labels = {"prompt": key} | ({"agent": name} if name else {})
    return Run(instance_id=key, repetition_id=None, places=[place], labels=labels)


def read_state(state: _State, run: Run, _: Options) -> Trajectory:
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


OPENAI_AGENTS = Records(
    records={"": _State},
    leaves=_STATE_LEAVES,
    run=run_of_state,
    read=read_state,
    is_record=like("$schemaVersion original_input generated_items model_responses"),
    groups="inferred: runs with the same input",
).adapter("states of runs of OpenAI's Agents SDK (RunState), one JSON document each")
