"""smolagents, tau2-bench and OpenAI's Agents SDK: what the model saw is what the row holds."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_io.formats import agent_frameworks, tau2
from rollout_io.formats.base import Options
from rollout_io.formats.detect import load_formats, recognize
from rollout_io.formats.dialects.responses import PROGRAM_CALLS
from rollout_io.formats.parsing.jsonl import UNREADABLE
from schemas.errors import RolloutError
from tests.helpers.adapter_helpers import planned, read_all
from tests.helpers.examples import examples
from tests.helpers.text_log_helpers import check_survives, mutated
from tests.helpers.text_log_helpers import read_all as read_all_runs

FORMATS = load_formats().adapters


def saved(tmp_path, value, *, indent=None):
    path = tmp_path / "log.json"
    path.write_text(json.dumps(value, indent=indent))
    return path


def read_one(name, path):
    assert recognize(path, FORMATS) == [name]
    ((run, found),), rejected = read_all(FORMATS[name], path)
    assert rejected == []
    return run, found


def text(said):
    return [{"type": "text", "text": said}]


CALL = {"id": "c0", "type": "function", "function": {"name": "ls", "arguments": {"n": 1}}}
SMOL = [
    {"task": "Files?", "task_images": None},
    {
        "step_number": 1,
        "model_input_messages": [
            {"role": "system", "content": text("Be kind."), "raw": None},
            {"role": "user", "content": text("New task:\nFiles?")},
        ],
        "model_output_message": {"role": "assistant", "content": None, "tool_calls": [CALL]},
        "observations": "a.txt",
    },
    {
        "step_number": 2,
        "model_input_messages": [
            {"role": "system", "content": text("Be kind.")},
            {"role": "user", "content": text("New task:\nFiles?")},
            {"role": "tool-call", "content": text("Calling tools:\nls")},
            {"role": "tool-response", "content": text("Observation:\na.txt")},
            {"role": "user", "content": text("Go on.")},
        ],
        "model_output_message": {"role": "assistant", "content": "One."},
    },
    {"step_number": 3, "model_input_messages": None, "model_output_message": None},
]


@pytest.mark.parametrize("indent", [None, 1])
def test_the_calls_of_smolagents_have_the_roles_that_its_models_get(tmp_path, indent):
    _, found = read_one("smolagents", saved(tmp_path, SMOL, indent=indent))
    first, second = found.steps
    assert [m["role"] for m in first.messages] == ["system", "user", "assistant"]
    (call,) = first.messages[-1]["tool_calls"]
    assert call["function"] == {"name": "ls", "arguments": '{"n":1}'}
    assert [(m["role"], m["content"]) for m in second.messages[1:]] == [
        ("user", "New task:\nFiles?"),
        ("assistant", "Calling tools:\nls"),
        ("user", "Observation:\na.txt\nGo on."),
        ("assistant", "One."),
    ]
    assert second.num_given == 4
    assert found.notes == {agent_frameworks.NO_ANSWER: 1}
    assert found.unread == {}


def simulation(**more):
    call = {"id": "c1", "name": "find", "arguments": {"id": "u1"}, "requestor": "assistant"}
    own = {"id": "c2", "name": "look", "arguments": {}, "requestor": "user"}
    messages = [
        {"role": "assistant", "content": "Hi! How can I help?", "raw_data": None},
        {"role": "user", "content": "Cancel."},
        {"role": "assistant", "content": None, "tool_calls": [call], "raw_data": {"x": 1}},
        {"role": "tool", "id": "c1", "content": "found", "requestor": "assistant"},
        {"role": "user", "content": None, "tool_calls": [own]},
        {"role": "tool", "id": "c2", "content": "hidden", "requestor": "user"},
        {"role": "assistant", "content": "Done.", "raw_data": {"x": 1}},
    ]
    found = {"id": "s", "task_id": "40", "trial": 2, "termination_reason": "user_stop"}
    return found | {"reward_info": {"reward": 1.0}, "messages": messages} | more


def test_the_agent_of_tau2_sees_no_tools_of_the_user_and_its_greeting_is_given(tmp_path):
    info = {"environment_info": {"domain_name": "airline", "policy": "Refuse politely."}}
    failed = simulation(task_id="41", termination_reason="too_many_errors")
    results = {"info": info, "tasks": [], "simulations": [simulation(), failed]}
    path = saved(tmp_path, results, indent=2)
    assert recognize(path, FORMATS) == ["tau2"]
    ((run, found), (_, second)), rejected = read_all(tau2.ADAPTER, path)
    assert rejected == []
    assert (run.instance_id, run.repetition_id, found.reward) == ("40", 2, 1.0)
    (step,) = found.steps
    said = [(m["role"], m["content"]) for m in step.messages]
    assert said == [
        ("system", "Refuse politely."),
        ("assistant", "Hi! How can I help?"),
        ("user", "Cancel."),
        ("assistant", ""),
        ("tool", "found"),
        ("assistant", "Done."),
    ]
    assert step.num_given == 2
    assert found.notes == {tau2.POLICY: 1}
    assert second.error == "too_many_errors"


@pytest.mark.parametrize("indent", [None, 2])
def test_an_index_of_tau2_is_refused_unless_its_simulations_are_there(indent, tmp_path):
    info = {"environment_info": {"domain_name": "airline", "policy": "Refuse politely."}}
    entries = [{"id": name, "task_id": "40", "trial": i} for i, name in enumerate("ab")]
    index = {"timestamp": "t", "info": info, "tasks": [], "simulation_index": entries}
    (tmp_path / "simulations").mkdir()
    path = tmp_path / "results.json"
    path.write_text(json.dumps(index, indent=indent))
    files = []
    for i, name in enumerate("ab"):
        files.append(tmp_path / "simulations" / f"{name}.json")
        files[-1].write_text(json.dumps(simulation(id=name, trial=i), indent=indent))
    assert recognize(path, FORMATS) == ["tau2"]
    for paths, number in (([path], 2), ([path, files[0]], 1)):
        found, (rejected,) = read_all(tau2.ADAPTER, *paths)
        assert (len(found), rejected.error.rule) == (len(paths) - 1, "no_conversation")
        assert f"{number} simulation" in rejected.error.got
        assert "simulations" in rejected.error.expected
    found, rejected = read_all(tau2.ADAPTER, path, *files)
    assert [run.labels["id"] for run, _ in found] == ["a", "b"]
    assert rejected == []
    if indent:
        assert {each.steps[0].messages[0]["content"] for _, each in found} == {"Refuse politely."}


def test_an_experiment_of_tau2_without_simulations_is_told_what_is_missing(tmp_path):
    path = saved(tmp_path, {"info": {"environment_info": {}}, "tasks": [{"id": "1"}]})
    assert recognize(path, FORMATS) == ["tau2"]
    found, (rejected,) = read_all(tau2.ADAPTER, path)
    assert (found, rejected.error.rule) == ([], "no_conversation")


def test_the_policy_of_a_simulation_precedes_that_of_its_domain(tmp_path):
    path = saved(tmp_path, simulation(policy="Know it all."))
    ((_, found),), _ = read_all(tau2.ADAPTER, path)
    assert found.steps[0].messages[0]["content"] == "Know it all."


def test_a_simulation_of_voice_is_refused_by_name(tmp_path):
    path = saved(tmp_path, simulation(messages=None, ticks=[{"tick_id": 0}]))
    (run,) = planned(tau2.ADAPTER, path).runs
    with pytest.raises(RolloutError) as error:
        tau2.ADAPTER.read(run, Options())
    assert error.value.rule == "no_calls"


def state(*items):
    generated = [{"type": "item", "agent": {"name": "a"}, "raw_item": item} for item in items]
    return {
        "$schemaVersion": "1.17",
        "current_agent": {"name": "a"},
        "original_input": "Files?",
        "model_responses": [],
        "generated_items": generated,
    }


def test_a_saved_state_is_its_input_and_its_items(tmp_path):
    items = [
        {"type": "program", "call_id": "p", "code": "lookup()"},
        {
            "type": "function_call",
            "call_id": "f",
            "name": "lookup",
            "arguments": "{}",
            "caller": {"type": "program", "caller_id": "p"},
        },
        {"type": "program_output", "call_id": "p", "result": "done"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "One."}],
        },
    ]
    run, found = read_one("openai_agents", saved(tmp_path, state(*items)))
    (step,) = found.steps
    assert [m["role"] for m in step.messages] == ["user", "assistant", "tool", "assistant"]
    assert step.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"code":"lookup()"}'
    assert step.messages[2]["content"] == "done"
    assert (step.agent, step.num_given, run.labels["agent"]) == ("a", 1, "a")
    assert found.notes == {PROGRAM_CALLS: 1, agent_frameworks.NO_SYSTEM: 1}


def test_real_logs_of_these_programs_are_read_or_refused_by_name(harness_logs):
    newer, traces = (harness_logs.parent / n for n in ("harness_logs_2026", "agent_traces"))
    expected = {
        traces / "smol.steps.json": ("smolagents", ["weather"]),
        newer / "openai_agents" / "v1_13_programmatic_tool_calling.json": (
            "openai_agents",
            ["historical input", "lookup()", "done"],
        ),
    }
    for path, (name, texts) in expected.items():
        if not path.exists():
            pytest.skip(f"no {path}")
        _, found = read_one(name, path)
        held = json.dumps([step.messages for step in found.steps])
        assert all(each in held for each in texts), path
    for path in sorted((newer / "tau2_bench").glob("*.json")):
        assert recognize(path, FORMATS) == ["tau2"]
        _, rejected = read_all(tau2.ADAPTER, path)
        assert [each.error.rule for each in rejected] == ["no_calls"]


SPAN = {
    "context": {"trace_id": "0xt", "span_id": "0xs"},
    "parent_id": None,
    "start_time": 1,
    "attributes": {
        "openinference.span.kind": "LLM",
        "llm.input_messages.0.message.role": "user",
        "llm.input_messages.0.message.content": "Files?",
        "llm.output_messages.0.message.role": "assistant",
        "llm.output_messages.0.message.tool_calls.0.tool_call.function.name": "ls",
        "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text"}]}]),
    },
    "events": [{"name": "gen_ai.choice", "attributes": {"message": "{}"}}],
}
PARTS = [{"part_kind": "user-prompt", "content": ["Files?", {"kind": "image-url", "url": "u"}]}]
CHATS = [
    {"kind": "request", "parts": PARTS},
    {"type": "ai", "content": "One.", "tool_calls": [{"name": "ls", "args": {}, "id": "c"}]},
    {"role": "user", "blocks": [{"block_type": "text", "text": "x"}], "additional_kwargs": {}},
    {"from": "function_call", "value": json.dumps({"name": "ls", "arguments": {}})},
    {"type": "AssistantMessage", "content": [{"id": "c", "name": "ls", "arguments": "{}"}]},
    {"role": "model", "parts": [{"function_call": {"name": "ls", "args": {}}}]},
]
LOGS = {
    "smolagents": SMOL,
    "tau2": simulation(),
    "openai_agents": state({"type": "message", "role": "assistant", "content": "One."}),
    "traces": SPAN,
    "chats": CHATS,
}


@pytest.mark.parametrize("name", LOGS)
@given(st.data())
@settings(deadline=None, max_examples=examples(250))
def test_no_damage_loses_a_record_or_ends_in_a_traceback(name, data):
    content = data.draw(mutated(json.dumps(LOGS[name]).encode()))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.json"
        path.write_bytes(content)
        check_survives(FORMATS[name], path)
        for found in read_all_runs(FORMATS[name], path):
            assert getattr(found, "rule", "") != UNREADABLE, content
