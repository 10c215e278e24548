"""Tasks of Cline and Roo Code: lists of messages, and documents of sessions."""

import json

import pytest

from rollout_io.formats.cline import (
    ADAPTER,
    CHANGED,
    COMPACTED,
    ORPHANS,
    SHORTENED,
    SHOWN,
    UNCLEAR,
    UNSENT,
    WRITTEN,
)
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


def of_roo(tmp_path, *messages):
    """What is read of a list with the messages of Roo."""
    return read_one(save(tmp_path / "1" / "api_conversation_history.json", [*messages]))[1]


def turns(*texts, **fields):
    """Messages of the user and answers by turns, the user's first."""
    return [said(("user", "assistant")[i % 2], t, **fields) for i, t in enumerate(texts)]


def test_a_summary_of_roo_replaces_all_before_it_and_the_users_next_message_continues_it(tmp_path):
    history = [
        *turns("Go.", "One.", condenseParent="c"),
        *turns("Rest.", "Odd."),
        said("user", "In short.", isSummary=True, condenseId="c"),
        said("user", "On."),
        said("assistant", "Two."),
    ]
    found = of_roo(tmp_path, *history)
    assert [contents(step) for step in found.steps] == [
        ["Go.", "One.", "Rest.", "Odd."],
        ["In short.\nOn.", "Two."],
    ]
    assert (found.notes, found.unread) == ({SUMMARIES: 1}, {})


def test_a_summary_that_is_an_answer_follows_the_first_message_and_the_last_three_follow_it(
    tmp_path,
):
    history = [
        *turns("Go.", "One.", "a", "Two."),
        said("assistant", "In short.", isSummary=True, condenseId="c"),
        *turns("b", "Three.", "c", "Four.", "d", "Five."),
    ]
    found = of_roo(tmp_path, *history)
    assert [(contents(step), step.num_given) for step in found.steps] == [
        (["Go.", "One.", "a", "Two.", "b", "Three.", "c"], 0),
        (["Go.", "In short.", "b", "Three.", "c", "Four.", "d", "Five."], 4),
    ]
    assert found.notes == {SUMMARIES: 1}


def test_answers_behind_a_summary_whose_messages_are_gone_are_given_if_it_kept_them(tmp_path):
    history = [said("user", "Go."), said("assistant", "In short.", isSummary=True)]
    found = of_roo(tmp_path, *history, *turns("a", "Two.", "b", "Three."))
    (step,) = found.steps
    assert contents(step) == ["Go.", "In short.", "a", "Two.", "b", "Three."]
    assert (step.num_given, found.notes) == (4, {SUMMARIES: 1, UNCLEAR: 1})


@pytest.mark.parametrize("is_first", [False, True])
def test_a_truncation_of_roo_hides_messages_only_from_answers_after_it(is_first, tmp_path):
    mark = said(
        "assistant" if is_first else "user", "Cut.", isTruncationMarker=True, truncationId="t"
    )
    hidden = turns("b", "Two.", truncationParent="t")[::-1]
    kept = turns("Three.", "c", "Four.", "d", "Five.")
    kept = [m | {"role": "user" if m["content"][0]["text"] in "cd" else "assistant"} for m in kept]
    before = [mark, *hidden] if is_first else [*hidden, mark]
    found = of_roo(tmp_path, said("user", "Go."), *before, *kept)
    cut = ["Go.", "Cut.", "Three.", "c", "Four.", "d", "Five."]
    assert [(contents(step), step.num_given) for step in found.steps] == [
        (["Go.", "Two.", "b", "Three.", "c"], 0),
        (cut, 5),
    ]
    assert found.notes == {UNCLEAR: 1}


def test_results_whose_calls_a_summary_replaced_are_not_sent(tmp_path):
    history = [said("user", "Go."), TASK[1]]
    history += [said("user", "In short.", isSummary=True, condenseId="c")]
    found = of_roo(tmp_path, *history, said("user", RESULT), said("assistant", "So."))
    assert contents(found.steps[-1]) == ["In short.", "So."]
    assert found.notes == {SUMMARIES: 1, ORPHANS: 1}


@pytest.mark.parametrize(
    "written",
    [
        "Failure: I did not provide a response.",
        "I look\n\n[Response interrupted by user]",
        "[Response interrupted by a tool use result. Only one tool may be used at a time and "
        "should be placed at the end of the message.]",
    ],
)
def test_answers_that_the_program_wrote_or_broke_off_do_not_train(written, tmp_path):
    found = of_roo(tmp_path, *turns("Go.", written, "On.", "Done [Response interrupted by]. Yes."))
    (step,) = found.steps
    assert (step.num_given, found.notes) == (2, {WRITTEN: 1})


def test_consecutive_messages_of_the_user_in_version_2_are_one(tmp_path):
    document = {"version": 2, "messages": [*SECOND[:3], *turns("b"), *turns("c", "Done.")]}
    (step,) = read_one(save(tmp_path / "1" / "history.json", document))[1].steps
    assert contents(step)[1:] == ["Look.", "abc", "b\nc", "Done."]


def test_consecutive_messages_of_the_user_are_one(tmp_path):
    history = [said("user", "Go."), TASK[1], said("user", RESULT), said("user", "b")]
    found = of_roo(tmp_path, *history, said("user") | {"content": "c"}, *turns("d", "Done."))
    (step,) = found.steps
    assert contents(step) == ["Go.", "Look.", "abc", "b\nc\nd", "Done."]


@pytest.mark.parametrize("more", [["On."], []])
@pytest.mark.parametrize("is_session", [False, True])
def test_a_call_without_a_result_has_the_one_that_the_program_sends(is_session, more, tmp_path):
    other = CALL | {"id": "u"}
    history = [said("user", "Go."), said("assistant", CALL, other), said("user", RESULT, *more)]
    history += [said("assistant", "Done.")]
    if is_session:
        found = read_one(save(tmp_path / "a.messages.json", cli("a", *history)))[1]
    else:
        found = of_roo(tmp_path, *history)
    (step,) = found.steps
    missing = "Tool execution was interrupted before a result was produced."
    results = ["abc", missing if is_session else "result missing"]
    assert contents(step)[2:] == [*results, *more, "Done."]
    assert [m.get("tool_call_id") for m in step.messages[2:4]] == ["t", "u"]


def test_thoughts_that_roo_may_not_send_again_are_counted(tmp_path):
    history = turns("Go.", "One.", "On.", "Two.")
    history[1]["content"].insert(0, {"type": "reasoning", "text": "Hm.", "summary": []})
    found = of_roo(tmp_path, *history)
    assert (found.notes, found.unread) == ({UNSENT: 1}, {})


def test_answers_after_cline_changed_earlier_messages_are_left_out(tmp_path):
    history = [m | {"ts": 10 + i} for i, m in enumerate(turns("Go.", "One.", "a", "Two."))]
    notice = [12, "text", ["[NOTE] Some were removed."], []]
    save(tmp_path / "1" / "context_history.json", [[1, [0, [[0, [notice]]]]]])
    found = of_roo(tmp_path, *history, *turns("b", "Three."))
    assert [contents(step) for step in found.steps] == [["Go.", "One.", "a"]]
    assert found.notes == {CHANGED: 2}


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


@pytest.mark.parametrize("is_list", [False, True])
def test_a_long_result_of_a_session_is_sent_without_its_middle(is_list, tmp_path):
    long = "a" * 5_000 + "é😀" * 5_000 + "b" * 5_000
    content = [{"query": "cat f", "result": long, "success": True}] if is_list else long
    history = [said("user", typed(long)), TASK[1], said("user", RESULT | {"content": content})]
    found = read_one(save(tmp_path / "a.messages.json", cli("a", *history, TASK[3])))[1]
    (step,) = found.steps
    sent = json.loads(contents(step)[2])[0]["result"] if is_list else contents(step)[2]
    # JavaScript counts 😀 twice: 25 000 units, of which the program keeps 3 983 on either side.
    assert sent == "a" * 3_983 + "\n\n...[truncated 17034 chars]...\n\n" + "b" * 3_983
    assert (contents(step)[0], found.notes) == (long, {SHORTENED: 1})


def test_a_compaction_beside_a_session_takes_the_place_of_the_messages_that_it_counts(tmp_path):
    history = [m | {"content": m["content"][0]["text"]} for m in turns("Go.", "One.", "b", "Two.")]
    compacted = {
        "version": 1,
        "updated_at": "2026-07-17T02:04:41.983Z",
        "source_message_count": 2,
        "system_prompt": "Be brief.",
        "messages": [
            said("user", typed("Go."), metadata={"kind": "compaction"}),
            said("assistant", "1", metadata={"compaction": "preserved"}),
        ],
    }
    save(tmp_path / "a.compaction.json", compacted)
    path = save(tmp_path / "a.messages.json", cli("a", *history, system_prompt="You help."))
    found = read_one(path)[1]
    assert [(contents(step), step.num_given) for step in found.steps] == [
        (["You help.", "Go.", "One."], 0),
        (["Be brief.", "Go.", "1", "b", "Two."], 3),
    ]
    assert (found.notes, found.unread) == ({COMPACTED: 1}, {})


def test_what_a_compaction_says_beside_its_messages_is_named(tmp_path):
    compacted = {"source_message_count": 2, "messages": [said("user", "Go.", aside="Not read.")]}
    save(tmp_path / "a.compaction.json", compacted)
    path = save(tmp_path / "a.messages.json", cli("a", *turns("Go.", "One.", "b", "Two.")))
    (name,) = read_one(path)[1].unread
    assert (name[:19], name[-6:]) == ("compaction.messages", ".aside")


@pytest.mark.parametrize("name", ["../a", "b/a", "..", "a\0"])
def test_the_id_of_a_session_leads_to_no_other_folder(name, tmp_path):
    (tmp_path / "b").mkdir()
    for folder in (tmp_path, tmp_path / "b"):
        save(folder / "a.compaction.json", {"source_message_count": 2, "messages": []})
    path = save(tmp_path / "b" / "s.messages.json", cli(name, *turns("Go.", "One.")))
    (step,) = read_one(path)[1].steps
    assert contents(step) == ["Go.", "One."]


def test_an_answer_that_a_compaction_kept_in_a_session_does_not_train(tmp_path):
    kept = said("assistant", "1", metadata={"compaction": "preserved"})
    history = [said("user", "Go."), kept, *turns("b", "Two.")]
    found = read_one(save(tmp_path / "a.messages.json", cli("a", *history)))[1]
    (step,) = found.steps
    assert (contents(step), step.num_given) == (["Go.", "1", "b", "Two."], 2)
    assert found.notes == {UNCLEAR: 1}


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
