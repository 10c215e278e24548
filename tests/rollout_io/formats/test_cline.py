"""Tasks of Cline and Roo Code: lists of messages, and documents of sessions."""

import json

import pytest

from rollout_io.formats.cline import ADAPTER, SHOWN
from rollout_io.formats.contexts import SUMMARIES
from rollout_io.formats.detect import load_formats, recognize
from tests.helpers.adapter_helpers import read_all


def said(role, *blocks, **fields):
    parts = [{"type": "text", "text": b} if isinstance(b, str) else b for b in blocks]
    return {"role": role, "content": parts, "ts": 1} | fields


CALL = {"type": "tool_use", "id": "t", "name": "read_file", "input": {"path": "a"}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "abc"}]}
TASK = [
    said("user", "Fix.", "More."),
    said("assistant", "Look.", CALL, modelInfo={"modelId": "m", "providerId": "p", "mode": "act"}),
    said("user", RESULT),
    said("assistant", "Done.", reasoning_content="Hm."),
]


def save(path, value, indent=1):
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps(value, indent=indent))
    return path


def read_one(path):
    made, rejected = read_all(ADAPTER, path)
    assert rejected == []
    ((run, found),) = made
    return run, found


def contents(step):
    return [m["content"] for m in step.messages]


@pytest.mark.parametrize("indent", [None, 1])
def test_a_list_of_messages_is_a_task(indent, tmp_path):
    path = save(tmp_path / "17" / "api_conversation_history.json", TASK, indent)
    assert recognize(path, load_formats().adapters) == ["cline"]
    run, found = read_one(path)
    assert (run.instance_id, found.unread, found.user_values) == ("17", {}, {"model": "m"})
    (step,) = found.steps
    assert contents(step) == ["Fix.\nMore.", "Look.", "abc", "Done."]
    assert step.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"path":"a"}'
    assert step.messages[3]["reasoning_content"] == "Hm."


def test_a_session_has_its_system_prompt_and_name(tmp_path):
    messages = [{k: v for k, v in m.items() if k != "ts"} | {"id": "x"} for m in TASK]
    document = {"version": 1, "sessionId": "s", "agent": "lead agent", "messages": messages}
    path = save(tmp_path / "s.messages.json", document | {"system_prompt": "You help."})
    assert recognize(path, load_formats().adapters) == ["cline"]
    run, found = read_one(path)
    assert (run.instance_id, found.unread) == ("s", {})
    assert contents(found.steps[0])[:2] == ["You help.", "Fix.\nMore."]


PART = {"type": "tool-call", "toolCallId": "t", "toolName": "read_file", "input": {"path": "a"}}
OUTPUT = {"type": "tool-result", "toolCallId": "t", "toolName": "read_file"}
PICTURE = {"type": "image", "image": "iVBORw0KGgo=", "mediaType": "image/png"}
SIGNED = {"providerOptions": {"anthropic": {"signature": "a signature"}}}
SECOND = [
    said("user", "Fix.", PICTURE),
    said("assistant", {"type": "reasoning", "text": "Hm."} | SIGNED, "Look.", PART),
    said("tool", OUTPUT | {"output": {"type": "text", "value": "abc"}}),
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}], "ts": 1},
    said("assistant") | {"content": "Done."},
]


def test_a_document_of_version_2_has_the_messages_of_vercels_sdk(tmp_path):
    document = {"version": 2, "messages": SECOND}
    path = save(tmp_path / "17" / "api_conversation_history.json", document)
    assert recognize(path, load_formats().adapters) == ["cline"]
    run, found = read_one(path)
    assert (run.instance_id, found.unread, found.notes) == ("17", {}, {})
    (step,) = found.steps
    assert contents(step)[1:] == ["Look.", "abc", "Done."]
    source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    assert contents(step)[0][1] == {"type": "image", "source": source}
    assert [m.get("reasoning_content") for m in step.messages] == [None, "Hm.", None, "So."]
    assert step.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"path":"a"}'
    assert step.messages[2]["tool_call_id"] == "t"


@pytest.mark.parametrize("url", ["https://a/b.png", "data:image/png;base64,iVBORw0KGgo="])
def test_a_picture_of_version_2_may_have_a_url(url, tmp_path):
    document = {"version": 2, "messages": [said("user", PICTURE | {"image": url}), SECOND[-1]]}
    found = read_one(save(tmp_path / "17" / "history.json", document))[1]
    assert url in json.dumps(contents(found.steps[0])[0]) or "iVBORw0KGgo=" in str(found.steps)


def test_reasoning_of_version_2_without_an_answer_is_counted(tmp_path):
    document = {"version": 2, "messages": [SECOND[0], SECOND[-1], SECOND[3]]}
    found = read_one(save(tmp_path / "17" / "history.json", document))[1]
    assert found.notes == {"reasoning without an answer, left out": 1}


def test_a_summary_or_a_truncation_begins_a_context_without_what_it_replaces(tmp_path):
    history = [
        said("user", "Go.", condenseParent="c"),
        said("assistant", "One.", condenseParent="c"),
        said("user", "In short.", isSummary=True, condenseId="c"),
        said("user", "On."),
        said("assistant", "Two.", truncationParent="t"),
        said("user", "Some were removed.", isTruncationMarker=True, truncationId="t"),
        said("assistant", "Three."),
    ]
    found = read_one(save(tmp_path / "1" / "api_conversation_history.json", history))[1]
    assert [contents(step) for step in found.steps] == [
        ["Go.", "One."],
        ["In short.", "On.", "Two."],
        ["In short.", "On.", "Some were removed.", "Three."],
    ]
    assert found.notes == {SUMMARIES: 1}


def test_a_summary_whose_messages_are_gone_is_context_alone(tmp_path):
    history = [said("user", "Go."), said("assistant", "In short.", isSummary=True)]
    history += [said("user", "On."), said("assistant", "Two.")]
    found = read_one(save(tmp_path / "1" / "api_conversation_history.json", history))[1]
    (step,) = found.steps
    assert (contents(step), step.num_given) == (["Go.", "In short.", "On.", "Two."], 2)


def cli(name, *messages, **fields):
    """A session of Cline's CLI."""
    fields = {"version": 1, "sessionId": name, "agent": "lead", "updated_at": "now"} | fields
    origin = {"source": "cli", "mode": "user", "sessionId": name, "version": "3.0.65"}
    return {**fields, "origin": origin | fields.get("origin", {}), "messages": list(messages)}


def typed(text, mode="act"):
    return {"type": "text", "text": f'<user_input mode="{mode}">{text}</user_input>'}


@pytest.mark.parametrize("mode", ["act", "plan", "yolo"])
def test_the_users_text_in_a_session_is_sent_without_what_surrounds_it(mode, tmp_path):
    messages = [said("user", typed("Go.\n<b>On.</b>", mode)), said("assistant", "<user_input>")]
    messages += [said("user") | {"content": typed("More.", mode)["text"]}, said("assistant", "So.")]
    found = read_one(save(tmp_path / "a.messages.json", cli("a", *messages)))[1]
    (step,) = found.steps
    assert contents(step) == ["Go.\n<b>On.</b>", "<user_input>", "More.", "So."]
    assert (found.unread, found.notes) == ({}, {})


def test_results_and_files_in_a_session_are_sent_as_text(tmp_path):
    outputs = [
        {"query": "ls", "result": "a\n", "success": True},
        {"query": "é", "result": "", "error": "no", "success": False},
    ]
    listed = {"type": "tool_result", "tool_use_id": "t", "name": "x", "content": outputs}
    file = {"type": "file", "path": "/p/f.txt", "content": "text\n"}
    messages = [said("user", typed("See @f.txt"), file), TASK[1], said("user", listed)]
    messages += [TASK[1], TASK[2], TASK[3]]
    found = read_one(save(tmp_path / "a.messages.json", cli("a", *messages)))[1]
    (step,) = found.steps
    assert (
        contents(step)[0] == 'See @f.txt\n<file_content path="/p/f.txt">\ntext\n\n</file_content>'
    )
    results = [m["content"] for m in step.messages if m["role"] == "tool"]
    assert results == [json.dumps(outputs, separators=(",", ":"), ensure_ascii=False), "abc"]
    assert (found.unread, found.notes) == ({}, {})


def test_sub_agents_belong_to_the_run_of_their_session_and_errors_do_not_train(tmp_path):
    error = said("assistant", "fault", metadata={"displayOnly": True, "displayRole": "error"})
    main = cli("s", *TASK, system_prompt="You lead.")
    helpers = [
        cli(
            f"s__{name}",
            said("user", "Look."),
            answer,
            origin={"parentThreadId": "s", "subagent": name},
        )
        for name, answer in (("agent_1", error), ("agent_2", said("assistant", "Seen.")))
    ]
    paths = [
        save(tmp_path / f"{document['sessionId']}.messages.json", document)
        for document in (helpers[0], main, helpers[1])
    ]
    made, rejected = read_all(ADAPTER, *paths)
    ((run, found),) = made
    assert (run.instance_id, rejected, found.notes, found.unread) == ("s", [], {SHOWN: 1}, {})
    assert [(step.agent, contents(step)[-1]) for step in found.steps] == [
        (None, "Done."),
        ("agent_2", "Seen."),
    ]


@pytest.mark.parametrize("damage", [{"role": 1}, {"content": {"a": 1}}, {"isSummary": "yes"}])
def test_damage_is_named(damage, tmp_path):
    path = save(tmp_path / "1" / "api_conversation_history.json", [TASK[0], TASK[3] | damage])
    found, rejected = read_all(ADAPTER, path)
    assert (found, {r.error.rule for r in rejected}) == ([], {"record_type"})


@pytest.mark.parametrize("damage", [{"role": 1}, {"type": 3}, {"role": None}])
def test_damage_of_version_2_is_named(damage, tmp_path):
    document = {"version": 2, "messages": [SECOND[0], SECOND[1] | damage, SECOND[-1]]}
    found, rejected = read_all(ADAPTER, save(tmp_path / "1" / "history.json", document))
    assert found == []
    assert {r.error.rule for r in rejected} <= {"record_type", "message"}
