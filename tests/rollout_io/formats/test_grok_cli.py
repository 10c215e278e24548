"""Sessions of Grok's CLI: what a compaction wrote again, what the API's tools were called with, and pictures."""

import pytest

from rollout_io.formats.agent_programs import GROK as ADAPTER
from rollout_io.formats.agent_programs import KEPT, SHORTENED
from tests.helpers.adapter_helpers import read_all, write_lines

PICTURE = "data:image/png;base64,iVBORw0KGgo="


@pytest.fixture
def read(tmp_path):
    """The trajectory of a session's lines."""

    def read(*lines):
        ((_, reading),), rejected = read_all(ADAPTER, write_lines(tmp_path / "a.jsonl", *lines))
        assert (rejected, reading.unread) == ([], {})
        return reading

    return read


def user(text, **fields):
    return {"type": "user", "content": [{"type": "text", "text": text}], **fields}


def told(text, **fields):
    return {"type": "assistant", "content": text, "model_id": "grok", **fields}


def calling(name):
    return told("", tool_calls=[{"id": name, "name": "read", "arguments": "{}"}])


def test_answers_that_a_compaction_wrote_again_are_part_of_the_prompt(read):
    meta = {"synthetic_reason": "compaction_meta"}
    written = [user("Info.", **meta), user("Go."), told("One."), user("In short.", **meta)]
    reading = read({"type": "system", "content": "Be brief."}, *written, told("Two."))
    (step,) = reading.steps
    prompt = ["Be brief.", "Info.", "Go.", "One."]
    assert [m["content"] for m in step.messages] == [*prompt, "In short.", "Two."]
    assert step.num_given == len(prompt)
    assert reading.notes == {KEPT: 1}


def test_calls_of_the_apis_tools_have_their_names_and_what_they_were_called_with(read):
    search = {"tool_type": "x_search", "id": "x", "call_id": "y", "status": "completed"}
    search |= {"name": "x_user_search", "input": '{"query": "sums"}'}
    code = {"tool_type": "code_interpreter", "id": "c", "code": "1 + 1", "container_id": "d"}
    web = {"tool_type": "web_search", "id": "w", "action": {"type": "search", "query": "sums"}}
    kinds = [{"type": "backend_tool_call", "kind": kind} for kind in (search, code, web)]
    (step,) = read(user("Go."), *kinds, told("Two.")).steps
    calls = [call["function"] for m in step.messages for call in m.get("tool_calls", ())]
    assert calls == [
        {"name": "x_user_search", "arguments": '{"query":"sums"}'},
        {"name": "code_interpreter", "arguments": '{"code":"1 + 1"}'},
        {"name": "web_search", "arguments": '{"type":"search","query":"sums"}'},
    ]


def test_pictures_of_results_and_thoughts_without_a_summary_are_read(read):
    thought = {"type": "reasoning", "summary": []}
    thought |= {"content": [{"type": "reasoning_text", "text": "Hm."}]}
    result = {"type": "tool_result", "tool_call_id": "c", "content": "A picture."}
    result |= {"images": [{"type": "image", "url": PICTURE}]}
    (step,) = read(user("Go."), calling("c"), result, thought, told("One.")).steps
    _, _, shown, answer = step.messages
    assert [part["type"] for part in shown["content"]] == ["text", "image"]
    assert answer["reasoning_content"] == "Hm."


@pytest.mark.parametrize(("num_turns", "count"), [(4, 0), (5, 1)])
def test_long_results_that_may_have_been_shortened_are_counted(num_turns, count, read):
    result = {"type": "tool_result", "tool_call_id": "c", "content": "a" * 4001}
    turns = [line for i in range(num_turns - 1) for line in (user(f"More {i}."), told(f"{i}."))]
    reading = read(user("Go."), calling("c"), result, *turns)
    assert reading.notes.get(SHORTENED, 0) == count
