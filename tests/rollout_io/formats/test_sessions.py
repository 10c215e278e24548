"""Sessions of coding agents: what is in their logs is in the contexts, in order and once."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings

from rollout_io.formats.detect import load_formats, recognize
from rollout_io.formats.dialects.pi import CUT
from rollout_io.formats.pi import EXTENDED
from rollout_io.formats.qwen_code import REMINDER
from tests.helpers.adapter_helpers import planned, read_all, write_lines
from tests.helpers.examples import examples
from tests.helpers.line_log_helpers import check_lines, mutated_lines
from tests.helpers.source_facts import missing_fact, read_source
from tests.helpers.structural_logs import CONVERSATION
from tests.rollout_io.formats.test_source_is_kept import (
    SYSTEM_IS_USER,
    WRITERS,
    check_file,
    spelled,
)

FORMATS = load_formats().adapters
LINES = ["copilot_cli", "cursor", "droid", "grok_cli", "kimi_cli", "openclaw", "openhands_sdk"]
LINES += ["pi", "qwen_code"]


def written(name):
    rename = {"system": "user"} if name in SYSTEM_IS_USER else {}
    messages = [m | {"role": rename.get(m["role"], m["role"])} for m in CONVERSATION]
    return WRITERS[name][0](messages).encode()


def contexts(name, path, *more):
    """The (agent, texts, number of given messages) of each context of the only run."""
    ((_, found),), rejected = read_all(FORMATS[name], path, *more)
    assert rejected == []
    return [(s.agent, [m["content"] for m in s.messages], s.num_given) for s in found.steps]


@pytest.mark.parametrize("name", LINES)
def test_a_session_is_recognized_as_one_format_with_all_its_keys(name, tmp_path):
    path = tmp_path / WRITERS[name][1]
    path.write_bytes(written(name))
    assert recognize(path, FORMATS) == [name]
    ((_, found),), _ = read_all(FORMATS[name], path)
    assert found.unread == {}


@pytest.mark.parametrize("name", LINES)
def test_no_damage_loses_a_line_or_ends_in_a_traceback(name):
    @given(mutated_lines(written(name)))
    @settings(deadline=None, max_examples=examples(60))
    def holds(content):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "s.jsonl"
            path.write_bytes(content)
            check_lines(FORMATS[name], path)

    holds()


NO_PROMPT = ("openhands_sdk",)
"""Logs that begin with an answer, so that there is nothing to sample from: refused by name."""

NAMED = {"kimi_cli": {"context.append_loop_event.event.result.note": 2}}
"""What a real session holds in neither list of its format: named with its count."""

REAL = {
    "gemini_cli": "gemini_cli/large.json",
    "kimi_cli": "kimi_cli/assistant_tools.jsonl",
    "openclaw": "inspect_scout_openclaw/crux1-sample-telemetry.jsonl",
    "openhands_sdk": "openhands_sdk/events.jsonl",
    "pi": "pi/small.jsonl",
    "qwen_code": "qwen_code/019f0000-0000-7000-8000-000000000004.jsonl",
}


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_a_real_session_says_what_a_plain_reader_finds(name, harness_logs, smollm2_dir, tmp_path):
    path = harness_logs.parent / "harness_logs_2026" / REAL[name]
    if not path.is_file():
        pytest.skip(f"no {path}")
    assert recognize(path, FORMATS) == [name]
    (((_, found),), _) = read_all(FORMATS[name], path)
    assert found.unread == NAMED.get(name, {})
    said = "".join(spelled(step.messages) for step in found.steps)
    assert missing_fact(next(iter(read_source(name, path).values())), said) is None
    choices = {"tokenizer": str(smollm2_dir), "chat_template": "chatml_tools_thinking"}
    assert check_file(path, name, tmp_path / "ds", **choices) == (name not in NO_PROMPT)


def said(id, parent, role, text, **fields):
    message = {"role": role, "content": [{"type": "text", "text": text}]} | fields
    return {"type": "message", "id": id, "parentId": parent, "message": message}


PI_HEAD = {"type": "session", "version": 3, "id": "s", "timestamp": "t", "cwd": "/w"}


def test_branches_of_pi_share_their_answers_and_the_live_one_is_last(tmp_path):
    lines = [PI_HEAD, said("a", None, "user", "Go."), said("b", "a", "assistant", "One.")]
    lines += [said("c", "b", "user", "Left?"), said("d", "c", "assistant", "Left.")]
    lines += [{"type": "branch_summary", "id": "e", "parentId": "b", "summary": "It was left."}]
    lines += [said("f", "e", "user", "Right?"), said("g", "f", "assistant", "Right.")]
    first, live = contexts("pi", write_lines(tmp_path / "s.jsonl", *lines))
    assert first == (None, ["Go.", "One.", "Left?", "Left."], 0)
    assert live[1][:2] == ["Go.", "One."]
    assert "It was left." in live[1][2]
    assert (live[1][3:], live[2]) == (["Right?", "Right."], 2)


def test_what_pi_sends_of_commands_and_extensions_is_read_and_failed_answers_are_not(tmp_path):
    command = {"role": "bashExecution", "command": "ls", "output": "a", "exitCode": 2}
    hidden = command | {"excludeFromContext": True}
    lines = [PI_HEAD, said("a", None, "user", "Go.")]
    lines += [{"type": "message", "id": "b", "parentId": "a", "message": command}]
    lines += [{"type": "message", "id": "c", "parentId": "b", "message": hidden}]
    lines += [{"type": "custom_message", "id": "d", "parentId": "c", "content": "Mind the gap."}]
    lines += [said("e", "d", "assistant", "Hal", stopReason="aborted")]
    lines += [said("f", "e", "assistant", "Done.")]
    lines += [said("g", "f", "assistant", "", stopReason="error", errorMessage="No credit.")]
    ((_, found),), _ = read_all(FORMATS["pi"], write_lines(tmp_path / "s.jsonl", *lines))
    assert found.error == "No credit."
    assert (found.notes.pop(EXTENDED), sum(found.notes.values())) == (1, 2)
    texts = [m["content"] for m in found.steps[0].messages]
    assert texts[0] == "Go."
    assert texts[1] == "Ran `ls`\n```\na\n```\n\nCommand exited with code 2"
    assert texts[2:] == ["Mind the gap.", "Done."]


def test_a_fork_of_pi_has_the_copied_answers_in_its_prompt_and_a_copy_is_refused(tmp_path):
    lines = [PI_HEAD, said("a", None, "user", "Go."), said("b", "a", "assistant", "One.")]
    more = [said("c", "b", "user", "On."), said("d", "c", "assistant", "Two.")]
    fork = [PI_HEAD | {"id": "f", "parentSession": "s.jsonl"}, *lines[1:], *more]
    paths = [write_lines(tmp_path / "f.jsonl", *fork), write_lines(tmp_path / "s.jsonl", *lines)]
    made, rejected = read_all(FORMATS["pi"], *paths)
    assert rejected == []
    assert {run.instance_id: found.steps[0].num_given for run, found in made} == {"s": 0, "f": 2}
    copy = write_lines(tmp_path / "g.jsonl", PI_HEAD | {"id": "g"}, *lines[1:])
    made, rejected = read_all(FORMATS["pi"], *paths, copy)
    assert len(made) == 2
    assert {r.error.rule for r in rejected} == {"duplicate_record"}


def qwen(uuid, parent, kind, **fields):
    return {"uuid": uuid, "parentUuid": parent, "sessionId": "s", "type": kind} | fields


def spoken(role, text):
    return {"message": {"role": role, "parts": [{"text": text}]}}


def test_a_compression_of_qwen_code_begins_a_context_with_its_history(tmp_path):
    history = [{"role": "user", "parts": [{"text": "In short."}]}]
    history += [{"role": "model", "parts": [{"text": "I see."}]}]
    lines = [qwen("a", None, "user", **spoken("user", "Go."))]
    lines += [qwen("b", "a", "assistant", **spoken("model", "One."))]
    payload = {"compressedHistory": history, "info": {"x": 1}}
    lines += [qwen("c", "b", "system", subtype="chat_compression", systemPayload=payload)]
    lines += [qwen("d", "c", "user", **spoken("user", "More."))]
    lines += [qwen("e", "d", "assistant", **spoken("model", "Two."))]
    found = contexts("qwen_code", write_lines(tmp_path / "s.jsonl", *lines))
    assert found == [
        (None, ["Go.", "One."], 0),
        (None, ["In short.", "I see.", "More.", "Two."], 2),
    ]


def test_sub_agents_of_qwen_code_belong_to_their_session(tmp_path):
    main = [qwen("a", None, "user", **spoken("user", "Go."))]
    main += [qwen("b", "a", "assistant", **spoken("model", "One."))]
    side = {"isSidechain": True, "agentId": "explore-1", "agentName": "Explore"}
    sub = [qwen("c", None, "user", **spoken("user", "Look."), **side)]
    sub += [qwen("d", "c", "assistant", **spoken("model", "Seen."), **side)]
    paths = write_lines(tmp_path / "agent.jsonl", *sub), write_lines(tmp_path / "s.jsonl", *main)
    assert contexts("qwen_code", *paths) == [
        (None, ["Go.", "One."], 0),
        ("Explore", ["Look.", "Seen."], 0),
    ]


def wire(kind, **fields):
    return {"type": kind, "time": 1} | fields


def prompt(text, kind="user"):
    content = [{"type": "text", "text": text}]
    message = {"role": "user", "content": content, "toolCalls": [], "origin": {"kind": kind}}
    return wire("context.append_message", message=message)


def step(uuid, text):
    begin = {"type": "step.begin", "uuid": uuid}
    part = {"type": "content.part", "stepUuid": uuid, "part": {"type": "text", "text": text}}
    return [wire("context.append_loop_event", event=event) for event in (begin, part)]


def test_a_compaction_of_kimi_keeps_prompts_and_the_summary_and_undo_takes_back(tmp_path):
    lines = [wire("metadata", protocol_version="1.4"), wire("config.update", systemPrompt="Be.")]
    lines += [prompt("Go."), *step("1", "One."), prompt("Mind.", "injection"), prompt("On.")]
    lines += [
        *step("2", "Two."),
        prompt("Wrong."),
        *step("3", "Three."),
        wire("context.undo", count=1),
    ]
    lines += [wire("context.apply_compaction", contextSummary="In short.", keptUserMessageCount=1)]
    lines += [
        prompt("More."),
        *step("4", "Four."),
        wire("context.append_loop_event", event={"type": "step.begin"}),
    ]
    found = contexts("kimi_cli", write_lines(tmp_path / "s.jsonl", *lines))
    before = ["Be.", "Go.", "One.", "Mind.", "On.", "Two."]
    assert found == [
        (None, [*before, "Wrong.", "Three."], 0),
        (None, ["Be.", "On.", "In short.", "More.", "Four."], 0),
    ]


@pytest.mark.parametrize("kind", ["wire", "context"])
def test_answers_that_a_fork_of_kimi_copied_train_once(kind, tmp_path):
    if kind == "wire":
        head = [wire("metadata", protocol_version="1.4")]
        turns = [[prompt(f"{i}?"), *step(str(i), f"{i}.")] for i in range(3)]
    else:
        head = [{"role": "_system_prompt", "content": "Be."}]
        turns = [
            [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}."}]
            for i in range(3)
        ]
    paths = []
    for name, later in (("session_1", turns[1]), ("session_2", turns[2])):
        folder = tmp_path / name / ("agents/main" if kind == "wire" else "")
        folder.mkdir(parents=True)
        paths.append(write_lines(folder / f"{kind}.jsonl", *head, *turns[0], *later))
    found, rejected = read_all(FORMATS["kimi_cli"], *paths)
    trained = [
        m["content"]
        for _, made in found
        for each in made.steps
        for m in each.messages[each.num_given :]
        if m["role"] == "assistant"
    ]
    assert (sorted(trained), rejected) == (["0.", "1.", "2."], [])
    assert sorted(sum(made.notes.values()) for _, made in found) == [0, 1]


def test_agents_of_kimi_and_older_contexts_are_one_run(tmp_path):
    head = wire("metadata", protocol_version="1.4")
    agents = tmp_path / "session_1" / "agents"
    paths = [agents / name / "wire.jsonl" for name in ("main", "agent-0")]
    for path in paths:
        path.parent.mkdir(parents=True)
        write_lines(path, head, prompt("Go."), *step("1", path.parent.name))
    assert contexts("kimi_cli", *paths) == [
        (None, ["Go.", "main"], 0),
        ("agent-0", ["Go.", "agent-0"], 0),
    ]
    old = [{"role": "_system_prompt", "content": "Be."}, {"role": "user", "content": "Go."}]
    old += [{"role": "_checkpoint", "id": 0}]
    call = {"type": "function", "id": "c", "function": {"name": "ls", "arguments": "{}"}}
    thought = [{"type": "think", "think": "Hm."}, {"type": "text", "text": "One."}]
    old += [{"role": "assistant", "content": thought, "tool_calls": [call]}]
    old += [
        {"role": "tool", "content": "a", "tool_call_id": "c"},
        {"role": "_usage", "token_count": 3},
    ]
    path = write_lines(tmp_path / "session_1" / "context.jsonl", *old)
    ((run, found),), _ = read_all(FORMATS["kimi_cli"], path)
    assert run.instance_id == "session_1"
    *_, reply, result = found.steps[0].messages
    assert (reply["reasoning_content"], reply["content"]) == ("Hm.", "One.")
    assert reply["tool_calls"][0]["function"]["name"] == "ls"
    assert result == {"role": "tool", "content": "a", "tool_call_id": "c"}


def test_repeated_messages_of_openclaw_are_answers_once_whatever_the_ids_of_calls(tmp_path):
    def end(key, *messages, **fields):
        return {"type": "agent.end", "sessionKey": key, "messages": list(messages)} | fields

    def call(id):
        block = {"type": "toolCall", "id": id, "name": "ls", "arguments": {}}
        return {"role": "assistant", "content": [block]}

    user = {"role": "user", "content": "Go."}
    again, more = {"role": "assistant", "content": "Again."}, {"role": "user", "content": "On."}
    sub = "agent:main:subagent:1"
    lines = [end(sub, user, again, success=True), end("agent:main:main", user, call("a_1"))]
    lines += [end("agent:main:main", user, call("a1"), more, again, success=False, error="Late.")]
    ((_, found),), _ = read_all(FORMATS["openclaw"], write_lines(tmp_path / "t.jsonl", *lines))
    assert [(s.agent, len(s.messages), s.num_given) for s in found.steps] == [
        (None, 4, 0),
        (sub, 2, 0),
    ]
    assert found.error == "Late."


def test_records_without_a_parent_in_the_file_follow_the_line_before(tmp_path):
    lines = [PI_HEAD, said("a", "s", "user", "Go."), said("b", "lost", "assistant", "One.")]
    path = write_lines(tmp_path / "s.jsonl", *lines)
    ((_, found),), _ = read_all(FORMATS["pi"], path)
    assert [m["content"] for m in found.steps[0].messages] == ["Go.", "One."]
    assert list(found.notes.values()) == [1]
    assert (
        json.loads(path.read_text().splitlines()[0])["id"]
        == planned(FORMATS["pi"], path).runs[0].instance_id
    )


def event(id, kind, **fields):
    return {"id": id, "timestamp": "t", "source": "agent", "kind": kind} | fields


def oh_text(text):
    return [{"type": "text", "text": text, "cache_prompt": False}]


def message(id, role, text):
    return event(id, "MessageEvent", llm_message={"role": role, "content": oh_text(text)})


def action(id, response, text, name="ls"):
    call = {"id": id, "name": name, "arguments": "{}"}
    fields = {"tool_call": call, "llm_response_id": response, "thought": oh_text(text)}
    return event(id, "ActionEvent", **fields)


def result(id, call, text, **fields):
    observed = {"content": oh_text(text)} | fields
    return event(id, "ObservationEvent", tool_call_id=call, observation=observed)


TERMINAL = {"exit_code": 1, "working_dir": "/w", "prefix": "", "suffix": " (end)"}


def test_a_conversation_of_openhands_is_what_the_sdk_sends(tmp_path):
    prompt = event(
        "s", "SystemPromptEvent", system_prompt={"type": "text", "text": "Be."}, tools=[]
    )
    lines = [
        prompt | {"dynamic_context": {"type": "text", "text": "Now."}},
        message("u", "user", "Go."),
    ]
    lines += [action("a", "r1", "Both."), action("b", "r1", "", "cat"), result("c", "a", "x")]
    lines += [result("d", "b", "y", is_error=True, metadata=TERMINAL)]
    lines += [event("e", "AgentErrorEvent", tool_call_id="z", error="No tool.")]
    lines += [event("f", "UserRejectObservation", tool_call_id="z", rejection_reason="Never.")]
    lines += [message("g", "assistant", "Done."), event("h", "PauseEvent")]
    ((_, found),), _ = read_all(FORMATS["openhands_sdk"], write_lines(tmp_path / "e.jsonl", *lines))
    (step,) = found.steps
    assert found.unread == {}
    failed = "[An error occurred during execution.]\ny (end)"
    failed += "\n[Current working directory: /w]\n[Command finished with exit code 1]"
    assert [m["content"] for m in step.messages] == [
        "Be.\nNow.",
        "Go.",
        "Both.",
        "x",
        failed,
        "No tool.",
        "Action rejected: Never.",
        "Done.",
    ]
    assert [c["function"]["name"] for c in step.messages[2]["tool_calls"]] == ["ls", "cat"]


def test_a_condensation_forgets_events_and_puts_the_summary_in_their_place(tmp_path):
    lines = [message("u", "user", "Go."), message("a", "assistant", "One.")]
    lines += [message("v", "user", "On."), message("b", "assistant", "Two.")]
    forgotten = {"forgotten_event_ids": ["a", "v"], "summary": "In short.", "summary_offset": 1}
    lines += [event("c", "Condensation", **forgotten), message("d", "assistant", "Three.")]
    lines += [event("e", "ConversationErrorEvent", code="x", detail="No credit.")]
    path = write_lines(tmp_path / "e.jsonl", *lines)
    ((_, found),), _ = read_all(FORMATS["openhands_sdk"], path)
    assert found.error == "No credit."
    texts = [([m["content"] for m in s.messages], s.num_given) for s in found.steps]
    assert texts == [
        (["Go.", "One.", "On.", "Two."], 0),
        (["Go.", "In short.", "Two.", "Three."], 3),
    ]


def test_a_directory_of_events_is_one_conversation_and_token_events_are_exact(tmp_path):
    lines = [message("u", "user", "Go."), message("a", "assistant", "One.")]
    (tmp_path / "c" / "events").mkdir(parents=True)
    (tmp_path / "c" / "base_state.json").write_text("{}")
    for i, line in enumerate(lines):
        (tmp_path / "c" / "events" / f"event-{i}.json").write_text(json.dumps(line, indent=1))
    assert recognize(tmp_path / "c", FORMATS) == ["openhands_sdk"]
    assert contexts("openhands_sdk", tmp_path / "c") == [(None, ["Go.", "One."], 0)]
    tokens = event("t", "TokenEvent", prompt_token_ids=[1, 2], response_token_ids=[3])
    (tmp_path / "c" / "events" / "event-2.json").write_text(json.dumps(tokens))
    ((run, found),), _ = read_all(FORMATS["openhands_sdk"], tmp_path / "c")
    (step,) = found.steps
    assert len(run.places) == 3
    assert (step.prompt_token_ids.tolist(), step.response_ids.tolist()) == ([1, 2], [3])
    assert json.loads(step.messages) == [{"role": "user", "content": "Go."}]


def test_calls_of_openhands_in_a_directory_are_one_run_in_the_order_of_time(tmp_path):
    chat = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "One."}]
    chat += [{"role": "user", "content": "On."}, {"role": "assistant", "content": "Two."}]
    for end, name in ((3, "a.json"), (1, "b.json")):
        response = {"choices": [{"message": chat[end]}]}
        record = {"messages": chat[:end], "response": response, "timestamp": end, "latency_sec": 1}
        (tmp_path / name).write_text(json.dumps(record))
    ((run, found),), _ = read_all(FORMATS["openhands_llm"], *sorted(tmp_path.iterdir()))
    assert [place.path.name for place in run.places] == ["b.json", "a.json"]
    assert [(s.messages, s.num_given) for s in found.steps] == [(chat, 1)]


def test_the_real_log_of_a_call_is_read(harness_logs):
    found = [*(harness_logs.parent / "harness_logs_2026" / "openhands_sdk").glob("litellm*")]
    if not found:
        pytest.skip("no log of a call")
    assert recognize(found[0], FORMATS) == ["openhands_llm"]
    ((_, read),), _ = read_all(FORMATS["openhands_llm"], found[0])
    record = json.loads(found[0].read_text())
    (step,) = read.steps
    assert read.unread == {}
    assert len(step.messages) == len(record["messages"]) + 1
    assert [t["function"]["name"] for t in step.tools] == [
        t["function"]["name"] for t in record["tools"]
    ]
    assert step.messages[0]["content"] == record["messages"][0]["content"][0]["text"]
    call = record["response"]["choices"][0]["message"]["tool_calls"][0]["function"]
    arguments = step.messages[-1]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments) == json.loads(call["arguments"])


def copilot(kind, id, **data):
    return {"type": kind, "id": id, "parentId": None, "timestamp": "t", "data": data}


def test_sub_agents_of_copilot_have_the_prompt_of_their_call_and_a_compaction_its_summary(tmp_path):
    task = {"toolCallId": "c", "name": "task", "arguments": {"prompt": "Look around."}}
    lines = [
        copilot("session.start", "1", sessionId="s"),
        copilot("user.message", "2", content="Go."),
    ]
    lines += [copilot("assistant.message", "3", content="One.", toolRequests=[task])]
    lines += [copilot("subagent.started", "4", toolCallId="c", agentName="explore")]
    lines += [copilot("assistant.message", "5", content="Seen.", parentToolCallId="c")]
    lines += [copilot("tool.execution_complete", "6", toolCallId="c", result={"content": "Seen."})]
    lines += [copilot("assistant.message", "7", content="Two.")]
    lines += [copilot("session.snapshot_rewind", "8", upToEventId="7")]
    lines += [copilot("assistant.message", "9", content="Three.")]
    lines += [copilot("session.compaction_complete", "10", summaryContent="In short.")]
    lines += [copilot("assistant.message", "11", content="Four.")]
    lines += [copilot("session.error", "12", message="No credit.")]
    ((_, found),), _ = read_all(FORMATS["copilot_cli"], write_lines(tmp_path / "e.jsonl", *lines))
    assert found.error == "No credit."
    assert [(s.agent, [m["content"] for m in s.messages], s.num_given) for s in found.steps] == [
        (None, ["Go.", "One.", "Seen.", "Two."], 0),
        (None, ["Go.", "One.", "Seen.", "Three."], 2),
        (None, ["In short.", "Four."], 0),
        ("explore", ["Look around.", "Seen."], 0),
    ]


def test_calls_and_results_of_cursor_without_ids_belong_together_in_order(tmp_path):
    calls = [{"type": "tool_use", "name": name, "input": {}} for name in ("ls", "cat")]
    results = [{"type": "tool-result", "name": "x", "content": text} for text in ("a", "b")]
    lines = [{"role": "user", "message": {"content": [{"type": "text", "text": "Go."}]}}]
    lines += [{"role": "assistant", "message": {"content": calls}}]
    lines += [{"role": "user", "message": {"content": results}}]
    ((_, found),), _ = read_all(FORMATS["cursor"], write_lines(tmp_path / "a.jsonl", *lines))
    _, reply, *answers = found.steps[0].messages
    assert [m["tool_call_id"] for m in answers] == [c["id"] for c in reply["tool_calls"]]
    assert [m["content"] for m in answers] == ["a", "b"]


def spoken_by(id, parent, model, *blocks, **fields):
    message = {"role": "assistant", "content": list(blocks), "model": model, "stopReason": "stop"}
    message["api"] = "openai-completions"
    return {"type": "message", "id": id, "parentId": parent, "message": message | fields}


def thinks(text):
    return {"type": "thinking", "thinking": text}


def says(text):
    return {"type": "text", "text": text}


def pi_steps(tmp_path, *lines):
    ((_, found),), rejected = read_all(FORMATS["pi"], write_lines(tmp_path / "s.jsonl", *lines))
    assert (rejected, found.unread) == ([], {})
    return found.steps


def texts_of(step):
    return [m["content"] for m in step.messages]


@pytest.mark.parametrize("blocks", [[thinks("Hm."), says("One.")], [says("One."), thinks("Hm.")]])
def test_thoughts_of_pi_are_sent_to_another_model_as_text_where_they_stand(blocks, tmp_path):
    lines = [PI_HEAD, said("a", None, "user", "Go."), spoken_by("b", "a", "m", *blocks)]
    lines += [said("c", "b", "user", "On."), spoken_by("d", "c", "n", thinks("So."), says("Two."))]
    first, second = pi_steps(tmp_path, *lines)
    assert first.messages[1]["reasoning_content"] == "Hm."
    joined = "".join(each.get("thinking", each.get("text")) for each in blocks)
    assert texts_of(second) == ["Go.", joined, "On.", "Two."]
    assert [m.get("reasoning_content") for m in second.messages] == [None, None, None, "So."]


def test_an_answer_of_pi_that_failed_while_it_thought_is_counted_once(tmp_path):
    lines = [PI_HEAD, said("a", None, "user", "Go.")]
    lines += [spoken_by("b", "a", "m", thinks("Hm."), says("Hal"), stopReason="aborted")]
    lines += [said("c", "b", "user", "On."), spoken_by("d", "c", "n", says("Two."))]
    ((_, found),), _ = read_all(FORMATS["pi"], write_lines(tmp_path / "s.jsonl", *lines))
    assert (texts_of(found.steps[0]), found.notes) == (["Go.", "On.", "Two."], {CUT: 1})


HEADED = {"role": "system", "content": "", "sections": {"preamble": "You are Pi.", "cwd": "/w"}}


def heads(id, parent, **fields):
    return {"type": "message", "id": id, "parentId": parent, "message": HEADED | fields}


def test_thoughts_are_dropped_for_another_model_since_pi_logs_its_system_prompt(tmp_path):
    lines = [PI_HEAD, heads("h", None), said("a", "h", "user", "Go.")]
    lines += [spoken_by("b", "a", "m", thinks("Hm."), says("One."))]
    lines += [said("c", "b", "user", "On."), spoken_by("d", "c", "n", says("Two."))]
    _, second = pi_steps(tmp_path, *lines)
    assert texts_of(second) == ["You are Pi.\n\n/w", "Go.", "One.", "On.", "Two."]
    assert all("reasoning_content" not in message for message in second.messages)


def test_a_context_of_pi_begins_with_the_system_prompt_and_tools_at_its_last_answer(tmp_path):
    tools = [{"name": name, "description": name, "parameters": {}} for name in ("ls", "cat")]
    lines = [PI_HEAD, heads("h", None, toolsAdded=tools[:1]), said("a", "h", "user", "Go.")]
    lines += [spoken_by("b", "a", "m", says("One."))]
    change = {"sections": {"preamble": None, "rules": "Be brief."}, "toolsAdded": tools[1:]}
    lines += [heads("i", "b", toolsRemoved=[{"name": "ls"}], **change)]
    lines += [said("c", "i", "user", "On."), spoken_by("d", "c", "m", says("Two."))]
    first, second = pi_steps(tmp_path, *lines)
    assert texts_of(first)[:3] == ["You are Pi.\n\n/w", "Go.", "One."]
    assert texts_of(second) == ["/w\n\nBe brief.", "Go.", "One.", "On.", "Two."]
    names = [[tool["function"]["name"] for tool in step.tools] for step in (first, second)]
    assert names == [["ls"], ["cat"]]
    assert texts_of(second)[second.num_given :] == ["Two."]


@pytest.mark.parametrize(
    ("replacement", "kept"),
    [(None, []), ({"role": "assistant", "content": "Edited."}, ["Edited."])],
)
def test_an_edit_of_pi_begins_a_context_with_the_system_prompt(replacement, kept, tmp_path):
    lines = [PI_HEAD, heads("h", None), said("a", "h", "user", "Go.")]
    lines += [spoken_by("b", "a", "m", says("One."))]
    edit = {"type": "context_edit", "id": "e", "parentId": "b", "targetId": "b"}
    lines += [edit | {"replacement": replacement}]
    lines += [said("c", "e", "user", "On."), spoken_by("d", "c", "m", says("Two."))]
    first, second = pi_steps(tmp_path, *lines)
    assert texts_of(first)[:3] == ["You are Pi.\n\n/w", "Go.", "One."]
    assert texts_of(second) == ["You are Pi.\n\n/w", "Go.", *kept, "On.", "Two."]
    assert all(m["role"] != "assistant" for m in second.messages[second.num_given : -1])


@pytest.mark.parametrize("num_results", [0, 1])
def test_calls_of_pi_without_a_result_are_sent_with_an_empty_one(num_results, tmp_path):
    calls = [{"type": "toolCall", "id": id, "name": "ls", "arguments": {}} for id in "xy"]
    lines = [PI_HEAD, said("a", None, "user", "Go."), spoken_by("b", "a", "m", says("."), *calls)]
    parent = "b"
    for id in "xy"[:num_results]:
        parent = f"r{id}"
        lines.append(said(parent, "b", "toolResult", f"of {id}", toolCallId=id))
    lines += [said("c", parent, "user", "On."), spoken_by("d", "c", "m", says("Two."))]
    (step,) = pi_steps(tmp_path, *lines)
    results = [(m["tool_call_id"], m["content"]) for m in step.messages if m["role"] == "tool"]
    expected = [("x", "of x"), ("y", "No result provided")]
    assert results == [expected[0] if num_results else ("x", "No result provided"), expected[1]]


def test_sub_agents_of_copilot_are_told_by_their_agents_id(tmp_path):
    task = {"toolCallId": "c", "name": "task", "arguments": {"prompt": "Look around."}}
    lines = [
        copilot("session.start", "1", sessionId="s"),
        copilot("user.message", "2", content="Go."),
        copilot("assistant.message", "3", content="One.", toolRequests=[task]),
        copilot("tool.execution_start", "4", toolCallId="c", arguments={"prompt": "Look around."}),
        copilot("subagent.started", "5", toolCallId="c", agentName="explore") | {"agentId": "x"},
        copilot("user.message", "6", content="Look around.") | {"agentId": "x"},
        copilot("assistant.message", "7", content="Seen.") | {"agentId": "x"},
        copilot("tool.execution_complete", "8", toolCallId="c", result={"content": "Seen."}),
        copilot("assistant.message", "9", content="Two."),
    ]
    ((_, found),), _ = read_all(FORMATS["copilot_cli"], write_lines(tmp_path / "e.jsonl", *lines))
    assert [(s.agent, texts_of(s), s.num_given) for s in found.steps] == [
        (None, ["Go.", "One.", "Seen.", "Two."], 0),
        ("explore", ["Look around.", "Seen."], 0),
    ]
    assert found.unread == {}


def test_sessions_of_qwen_code_are_counted_because_their_reminder_is_not_logged(tmp_path):
    lines = [qwen("1", None, "user", **spoken("user", "Go."))]
    lines += [qwen("2", "1", "assistant", **spoken("model", "One."))]
    lines += [qwen("3", "2", "user", **spoken("user", "On."))]
    lines += [qwen("4", "3", "assistant", **spoken("model", "Two."))]
    ((_, found),), _ = read_all(FORMATS["qwen_code"], write_lines(tmp_path / "s.jsonl", *lines))
    assert found.notes == {REMINDER: 1}
