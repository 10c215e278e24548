"""Sessions of coding agents: what is in their logs is in the contexts, in order and once."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings

from rollout_io.formats.detect import load_formats, recognize
from rollout_io.formats.dialects.pi import CUT
from rollout_io.formats.gemini_cli import REMINDER
from rollout_io.formats.pi import EXTENDED
from tests.helpers.adapter_helpers import read_all, write_lines
from tests.helpers.conversation_writers import log_of
from tests.helpers.examples import examples
from tests.helpers.line_log_helpers import check_lines, mutated_lines
from tests.helpers.source_facts import missing_fact, read_source, spelled
from tests.helpers.structural_logs import CONVERSATION
from tests.rollout_io.formats.test_source_is_kept import check_file

FORMATS = load_formats().adapters
LINES = ["copilot_cli", "cursor", "droid", "grok_cli", "kimi_cli", "openclaw", "openhands_sdk"]
LINES += ["pi", "qwen_code"]


@pytest.fixture
def read(tmp_path):
    """The trajectory of the only run of a format's files, each a list of lines."""

    def read(name, *files):
        paths = [write_lines(tmp_path / f"{i}.jsonl", *lines) for i, lines in enumerate(files)]
        ((_, reading),), rejected = read_all(FORMATS[name], *paths)
        assert rejected == []
        return reading

    return read


def texts(step):
    return [m["content"] for m in step.messages]


def contexts(reading):
    """The (agent, texts, number of given messages) of each context."""
    return [(step.agent, texts(step), step.num_given) for step in reading.steps]


@pytest.mark.parametrize("name", LINES)
def test_no_damage_loses_a_line_or_ends_in_a_traceback(name):
    @given(mutated_lines(log_of(name, CONVERSATION)[0]))
    @settings(deadline=None, max_examples=examples(60))
    def holds(content):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "s.jsonl"
            path.write_bytes(content)
            check_lines(FORMATS[name], path)

    holds()


NO_PROMPT = ("openhands_sdk",)
"""Logs that begin with an answer, so that there is nothing to sample from: refused by name."""

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
    assert found.unread == {}
    said = "".join(spelled(step.messages) for step in found.steps)
    assert missing_fact(next(iter(read_source(name, path).values())), said) is None
    choices = {"tokenizer": str(smollm2_dir), "chat_template": "chatml_tools_thinking"}
    assert check_file(path, name, tmp_path / "ds", **choices) == (name not in NO_PROMPT)


def says(text):
    return {"type": "text", "text": text}


def thinks(text):
    return {"type": "thinking", "thinking": text}


def spoken(role, *blocks, **fields):
    content = [says(block) if isinstance(block, str) else block for block in blocks]
    return {"type": "message", "message": {"role": role, "content": content} | fields}


def user(text):
    return spoken("user", text)


def answer(*blocks, model="m", **fields):
    fields = {"model": model, "stopReason": "stop", "api": "openai-completions"} | fields
    return spoken("assistant", *blocks, **fields)


PI_HEAD = {"type": "session", "version": 3, "id": "s", "timestamp": "t", "cwd": "/w"}


def pi(*records):
    """Lines of Pi named a, b, ...; each follows the one before unless it names another."""
    places = [{"id": chr(97 + i), "parentId": chr(96 + i) if i else None} for i in range(26)]
    return [PI_HEAD, *(place | record for place, record in zip(places, records, strict=False))]


def test_branches_of_pi_share_their_answers_and_the_live_one_is_last(read):
    away = {"type": "branch_summary", "parentId": "b", "summary": "It was left."}
    lines = [user("Go."), answer("One."), user("Left?"), answer("Left."), away, user("Right?")]
    first, live = contexts(read("pi", pi(*lines, answer("Right."))))
    assert first == (None, ["Go.", "One.", "Left?", "Left."], 0)
    assert live[1][:2] + live[1][3:] == ["Go.", "One.", "Right?", "Right."]
    assert "It was left." in live[1][2]
    assert live[2] == 2


def test_what_pi_sends_of_commands_and_extensions_is_read_and_failed_answers_are_not(read):
    command = {"role": "bashExecution", "command": "ls", "output": "a", "exitCode": 2}
    reading = read(
        "pi",
        pi(
            user("Go."),
            {"type": "message", "message": command},
            {"type": "message", "message": command | {"excludeFromContext": True}},
            {"type": "custom_message", "content": "Mind the gap."},
            answer(thinks("Hm."), "Hal", stopReason="aborted"),
            answer("Done.", model="n"),
            answer("", stopReason="error", errorMessage="No credit."),
        ),
    )
    assert (reading.error, reading.notes) == ("No credit.", {EXTENDED: 1, CUT: 2})
    ran = "Ran `ls`\n```\na\n```\n\nCommand exited with code 2"
    assert texts(reading.steps[0]) == ["Go.", ran, "Mind the gap.", "Done."]


def test_records_without_a_parent_in_the_file_follow_the_line_before(read):
    lines = pi(user("Go.") | {"parentId": "s"}, answer("One.") | {"parentId": "lost"})
    reading = read("pi", lines)
    assert texts(reading.steps[0]) == ["Go.", "One."]
    assert list(reading.notes.values()) == [1]


@pytest.mark.parametrize("blocks", [[thinks("Hm."), says("One.")], [says("One."), thinks("Hm.")]])
def test_thoughts_of_pi_are_sent_to_another_model_as_text_where_they_stand(blocks, read):
    last = answer(thinks("So."), "Two.", model="n")
    first, second = read("pi", pi(user("Go."), answer(*blocks), user("On."), last)).steps
    assert first.messages[1]["reasoning_content"] == "Hm."
    joined = "".join(item.get("thinking", item.get("text")) for item in blocks)
    assert texts(second) == ["Go.", joined, "On.", "Two."]
    assert [m.get("reasoning_content") for m in second.messages] == [None, None, None, "So."]


HEADED = {"role": "system", "content": "", "sections": {"preamble": "You are Pi.", "cwd": "/w"}}


def head(**fields):
    return {"type": "message", "message": HEADED | fields}


def test_thoughts_are_dropped_for_another_model_since_pi_logs_its_system_prompt(read):
    thought = answer(thinks("Hm."), "One.")
    lines = pi(head(), user("Go."), thought, user("On."), answer("Two.", model="n"))
    _, second = read("pi", lines).steps
    assert texts(second) == ["You are Pi.\n\n/w", "Go.", "One.", "On.", "Two."]
    assert all("reasoning_content" not in message for message in second.messages)


def test_a_context_of_pi_begins_with_the_system_prompt_and_tools_at_its_last_answer(read):
    tools = [{"name": name, "description": name, "parameters": {}} for name in ("ls", "cat")]
    change = {"sections": {"preamble": None, "rules": "Be brief."}, "toolsAdded": tools[1:]}
    changed = head(toolsRemoved=[{"name": "ls"}], **change)
    lines = [head(toolsAdded=tools[:1]), user("Go."), answer("One."), changed]
    first, second = read("pi", pi(*lines, user("On."), answer("Two."))).steps
    assert texts(first)[:3] == ["You are Pi.\n\n/w", "Go.", "One."]
    assert texts(second) == ["/w\n\nBe brief.", "Go.", "One.", "On.", "Two."]
    names = [[tool["function"]["name"] for tool in step.tools] for step in (first, second)]
    assert names == [["ls"], ["cat"]]
    assert texts(second)[second.num_given :] == ["Two."]


@pytest.mark.parametrize(
    ("replacement", "staying"),
    [(None, []), ({"role": "assistant", "content": "Edited."}, ["Edited."])],
)
def test_an_edit_of_pi_begins_a_context_with_the_system_prompt(replacement, staying, read):
    edit = {"type": "context_edit", "targetId": "c", "replacement": replacement}
    lines = pi(head(), user("Go."), answer("One."), edit, user("On."), answer("Two."))
    first, second = read("pi", lines).steps
    assert texts(first)[:3] == ["You are Pi.\n\n/w", "Go.", "One."]
    assert texts(second) == ["You are Pi.\n\n/w", "Go.", *staying, "On.", "Two."]
    assert all(m["role"] != "assistant" for m in second.messages[second.num_given : -1])


@pytest.mark.parametrize("num_results", [0, 1])
def test_calls_of_pi_without_a_result_are_sent_with_an_empty_one(num_results, read):
    calls = [{"type": "toolCall", "id": id, "name": "ls", "arguments": {}} for id in "xy"]
    results = [spoken("toolResult", "of x", toolCallId="x")][:num_results]
    lines = pi(user("Go."), answer(".", *calls), *results, user("On."), answer("Two."))
    (step,) = read("pi", lines).steps
    reading = [(m.get("tool_call_id"), m["content"]) for m in step.messages[-4:-1]]
    missing = "No result provided"
    assert reading == [("x", "of x" if num_results else missing), ("y", missing), (None, "On.")]


def test_a_compaction_of_pi_keeps_the_messages_from_the_one_that_it_names(read):
    cut = {"type": "compaction", "summary": "In short.", "firstKeptEntryId": "c"}
    before = [user("Go."), answer("One."), user("On."), answer("Two.")]
    first, second = read("pi", pi(*before, cut, user("More."), answer("Three."))).steps
    assert texts(second)[1:] == [*texts(first)[2:], "More.", "Three."]
    assert "In short." in texts(second)[0]


def qwen(*records):
    """Records of Qwen Code: (role, text) or fields; each follows the one before."""
    lines = []
    for i, record in enumerate(records):
        if isinstance(record, tuple):
            role, text = record
            message = {"role": role.replace("assistant", "model"), "parts": [{"text": text}]}
            record = {"type": role, "message": message}
        place = {"uuid": f"{i}", "parentUuid": f"{i - 1}" if i else None, "sessionId": "s"}
        lines.append(place | record)
    return lines


GO, ONE = ("user", "Go."), ("assistant", "One.")


def test_a_compression_of_qwen_code_begins_a_context_with_its_history(read):
    history = [{"role": "user", "parts": [{"text": "In short."}]}]
    history += [{"role": "model", "parts": [{"text": "I see."}]}]
    payload = {"compressedHistory": history, "info": {"x": 1}}
    cut = {"type": "system", "subtype": "chat_compression", "systemPayload": payload}
    reading = read("qwen_code", qwen(GO, ONE, cut, ("user", "More."), ("assistant", "Two.")))
    assert contexts(reading) == [
        (None, ["Go.", "One."], 0),
        (None, ["In short.", "I see.", "More.", "Two."], 2),
    ]


def test_sub_agents_of_qwen_code_belong_to_their_session(read):
    side = {"isSidechain": True, "agentId": "explore-1", "agentName": "Explore"}
    sub = [line | side for line in qwen(("user", "Look."), ("assistant", "Seen."))]
    reading = read("qwen_code", sub, qwen(GO, ONE))
    assert contexts(reading) == [(None, ["Go.", "One."], 0), ("Explore", ["Look.", "Seen."], 0)]


def test_sessions_of_qwen_code_are_counted_because_their_reminder_is_not_logged(read):
    reading = read("qwen_code", qwen(GO, ONE, ("user", "On."), ("assistant", "Two.")))
    assert reading.notes == {REMINDER: 1}


def wire(kind, **fields):
    return {"type": kind, "time": 1} | fields


WIRE = wire("metadata", protocol_version="1.4")


def prompt(text, kind="user"):
    message = {"role": "user", "content": [says(text)], "toolCalls": [], "origin": {"kind": kind}}
    return wire("context.append_message", message=message)


def step(text):
    begin = {"type": "step.begin", "uuid": text}
    part = {"type": "content.part", "stepUuid": text, "part": says(text)}
    return [wire("context.append_loop_event", event=event) for event in (begin, part)]


def test_a_compaction_of_kimi_keeps_prompts_and_the_summary_and_undo_takes_back(read):
    lines = [WIRE, wire("config.update", systemPrompt="Be."), prompt("Go."), *step("One.")]
    lines += [prompt("Mind.", "injection"), prompt("On."), *step("Two."), prompt("Wrong.")]
    lines += [*step("Three."), prompt("Worse."), *step("Four."), wire("context.undo", count=2)]
    lines += [wire("context.apply_compaction", contextSummary="In short.", keptUserMessageCount=1)]
    lines += [prompt("More."), *step("Five.")]
    lines += [wire("context.append_loop_event", event={"type": "step.begin"})]
    before = ["Be.", "Go.", "One.", "Mind.", "On.", "Two."]
    assert contexts(read("kimi_cli", lines)) == [
        (None, [*before, "Wrong.", "Three.", "Worse.", "Four."], 0),
        (None, ["Be.", "On.", "In short.", "More.", "Five."], 0),
    ]


def test_a_compaction_of_an_older_kimi_keeps_the_end(read):
    for more in ({}, {"legacyTail": True, "keptUserMessageCount": 1}):
        cut = wire("context.apply_compaction", summary="In short.", compactedCount=2, **more)
        lines = [WIRE, prompt("Go."), *step("One."), prompt("On."), *step("Two."), cut]
        first, second = read("kimi_cli", [*lines, prompt("More."), *step("Three.")]).steps
        assert texts(second) == ["In short.", *texts(first)[2:], "More.", "Three."]


def loop(kind, **fields):
    return wire("context.append_loop_event", event={"type": kind} | fields)


def calling(name, *calls):
    """A step of Kimi with calls."""
    parts = [loop("tool.call", stepUuid=name, toolCallId=c, name="ls", args={}) for c in calls]
    return [loop("step.begin", uuid=name), *parts]


FAILED = "<system>ERROR: Tool execution failed.</system>"
EMPTY = "<system>Tool output is empty.</system>"


@pytest.mark.parametrize(
    ("result", "content"),
    [
        ({"output": "a"}, "a"),
        ({"output": " "}, EMPTY),
        ({"output": "a", "isError": True}, f"{FAILED}\na"),
        ({"output": "", "isError": True}, FAILED[:-9] + " Tool output is empty.</system>"),
        ({"output": [says("a")], "note": "<system>cut</system>"}, "a\n<system>cut</system>"),
    ],
)
def test_a_result_of_kimi_is_what_its_model_was_sent(result, content, read):
    lines = [
        WIRE,
        prompt("Go."),
        *calling("s", "c"),
        loop("tool.result", toolCallId="c", result=result),
    ]
    (step_read,) = read("kimi_cli", [*lines, *step("One.")]).steps
    assert [m["content"] for m in step_read.messages if m["role"] == "tool"] == [content]


def test_what_is_written_during_a_call_of_kimi_follows_its_results_one_of_which_was_interrupted(
    read,
):
    lines = [WIRE, prompt("Go."), *calling("s", "c", "d"), prompt("Wait!")]
    lines += [loop("tool.result", toolCallId="c", result={"output": "a"}), *step("One.")]
    (step_read,) = read("kimi_cli", lines).steps
    roles = [(m["role"], m.get("tool_call_id")) for m in step_read.messages]
    results = [("tool", "c"), ("tool", "d")]
    assert roles == [
        ("user", None),
        ("assistant", None),
        *results,
        ("user", None),
        ("assistant", None),
    ]
    assert step_read.messages[3]["content"].startswith(f"{FAILED}\nTool execution was interrupted")


def test_prompts_of_kimi_in_a_row_are_one_message_and_what_the_program_writes_is_not(read):
    lines = [WIRE, prompt("Go."), prompt("On."), prompt("Mind.", "injection"), prompt("More.")]
    compaction = wire(
        "context.apply_compaction", contextSummary="In short.", keptUserMessageCount=3
    )
    reading = read("kimi_cli", [*lines, *step("One."), compaction, prompt("Now."), *step("Two.")])
    assert [texts(item) for item in reading.steps] == [
        ["Go.\n\nOn.", "Mind.", "More.", "One."],
        ["Go.\n\nOn.\n\nMore.", "In short.", "Now.", "Two."],
    ]


def test_a_step_of_kimi_that_broke_off_waits_for_results_and_one_that_ended_does_not(read):
    result = loop("tool.result", toolCallId="c", result={"output": "a"})
    for reason, num_late in (("interrupted", 0), ("tool_use", 1)):
        end = loop("step.end", uuid="s", finishReason=reason)
        lines = [WIRE, prompt("Go."), *calling("s", "c"), end, result, *step("One.")]
        reading = read("kimi_cli", lines)
        (text,) = (m["content"] for m in reading.steps[0].messages if m["role"] == "tool")
        assert (text == "a", sum(reading.notes.values())) == (not num_late, num_late)


def test_what_waited_for_a_call_of_kimi_is_gone_with_its_context(read):
    lines = [WIRE, prompt("Go."), *calling("s", "c"), prompt("Wait!"), wire("context.clear")]
    lines += [prompt("On.")]
    assert texts(read("kimi_cli", [*lines, *step("One.")]).steps[-1]) == ["On.", "One."]


def test_an_undo_of_kimi_takes_reminders_of_its_prompt_and_ends_at_a_compaction(read):
    typed = prompt("/fix", "skill_activation")
    typed["message"] |= {"id": "p"}
    typed["message"]["origin"] |= {"trigger": "user-slash"}
    reminder = prompt("Mind.", "injection")
    reminder["message"]["origin"] |= {"ownerPromptId": "p"}
    lines = [WIRE, prompt("Go."), *step("One.")]
    lines += [wire("context.apply_compaction", contextSummary="In short.", keptUserMessageCount=1)]
    lines += [reminder, typed, *step("Two.")]
    kept = ["Go.", "In short.", "Mind.", "/fix", "Two."]
    for count, after in ((1, ["Go.", "In short."]), (2, kept)):
        reading = read("kimi_cli", [*lines, wire("context.undo", count=count), *step("Three.")])
        assert texts(reading.steps[-1]) == [*after, "Three."], count


def test_answers_after_a_compaction_of_kimi_that_cut_the_users_messages_off_are_left_out(read):
    cut = wire(
        "context.apply_compaction",
        contextSummary="In short.",
        keptUserMessageCount=2,
        keptHeadUserMessageCount=1,
    )
    reading = read("kimi_cli", [WIRE, prompt("Go."), *step("One."), cut, *step("Two.")])
    assert (contexts(reading), [*reading.notes.values()]) == ([(None, ["Go.", "One."], 0)], [1])


@pytest.mark.parametrize("key", ["hint", "hidden"])
def test_what_kimi_and_copilot_say_beside_a_message_is_named(key, read):
    lines = [WIRE, prompt("Go."), *step("One.")]
    lines[1]["message"][key] = "Said."
    assert read("kimi_cli", lines).unread == {f"context.append_message.message.{key}": 1}
    events = copilot(("user.message", {"content": "Go.", key: "Said."}), told("One."))
    assert read("copilot_cli", events).unread == {f"user.message.data.{key}": 1}


def in_folder(tmp_path, name, *lines):
    """A file of Kimi, whose folder names its session."""
    (tmp_path / name).parent.mkdir(parents=True)
    return write_lines(tmp_path / name, *lines)


def test_answers_that_a_fork_of_an_older_kimi_copied_train_once(tmp_path):
    chat = [{"role": "_system_prompt", "content": "Be."}]
    for i in range(3):
        chat += [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}."}]
    files = {"session_1": chat[:5], "session_2": chat[:3] + chat[5:]}
    paths = [in_folder(tmp_path, f"{n}/context.jsonl", *lines) for n, lines in files.items()]
    reading, rejected = read_all(FORMATS["kimi_cli"], *paths)
    steps = [item for _, trajectory in reading for item in trajectory.steps]
    trained = [m for item in steps for m in item.messages[item.num_given :]]
    answers = sorted(m["content"] for m in trained if m["role"] == "assistant")
    assert (answers, rejected) == (["0.", "1.", "2."], [])
    assert sorted(sum(trajectory.notes.values()) for _, trajectory in reading) == [0, 1]


def test_agents_of_kimi_and_older_contexts_are_one_run(tmp_path):
    paths = [
        in_folder(tmp_path, f"session_1/agents/{n}/wire.jsonl", WIRE, prompt("Go."), *step(n))
        for n in ("main", "agent-0")
    ]
    ((_, reading),), _ = read_all(FORMATS["kimi_cli"], *paths)
    assert contexts(reading) == [
        (None, ["Go.", "main"], 0),
        ("agent-0", ["Go.", "agent-0"], 0),
    ]
    call = {"type": "function", "id": "c", "function": {"name": "ls", "arguments": "{}"}}
    thought = [{"type": "think", "think": "Hm."}, says("One.")]
    path = write_lines(
        tmp_path / "session_1" / "context.jsonl",
        {"role": "_system_prompt", "content": "Be."},
        {"role": "user", "content": "Go."},
        {"role": "_checkpoint", "id": 0},
        {"role": "assistant", "content": thought, "tool_calls": [call]},
        {"role": "tool", "content": "a", "tool_call_id": "c"},
        {"role": "_usage", "token_count": 3},
    )
    ((run, reading),), _ = read_all(FORMATS["kimi_cli"], path)
    assert run.instance_id == "session_1"
    *_, reply, result = reading.steps[0].messages
    assert (reply["reasoning_content"], reply["content"]) == ("Hm.", "One.")
    assert reply["tool_calls"][0]["function"]["name"] == "ls"
    assert result == {"role": "tool", "content": "a", "tool_call_id": "c"}


def test_repeated_messages_of_openclaw_are_answers_once_whatever_the_ids_of_calls(read):
    def end(key, *messages, **fields):
        return {"type": "agent.end", "sessionKey": key, "messages": list(messages)} | fields

    def call(id):
        block = {"type": "toolCall", "id": id, "name": "ls", "arguments": {}}
        return {"role": "assistant", "content": [block]}

    go, again = {"role": "user", "content": "Go."}, {"role": "assistant", "content": "Again."}
    main, sub = "agent:main:main", "agent:main:subagent:1"
    lines = [end(sub, go, again, success=True), end(main, go, call("a_1"))]
    lines += [end(main, go, call("a1"), go, again, success=False, error="Late.")]
    reading = read("openclaw", lines)
    assert [(s.agent, len(s.messages), s.num_given) for s in reading.steps] == [
        (None, 4, 0),
        (sub, 2, 0),
    ]
    assert reading.error == "Late."


def event(id, kind, **fields):
    return {"id": id, "timestamp": "t", "source": "agent", "kind": kind} | fields


def message(id, role, text):
    return event(id, "MessageEvent", llm_message={"role": role, "content": [says(text)]})


def action(id, response, text, name="ls"):
    call = {"id": id, "name": name, "arguments": "{}"}
    fields = {"tool_call": call, "llm_response_id": response, "thought": [says(text)]}
    return event(id, "ActionEvent", **fields)


def result(id, call, text, **fields):
    observed = {"content": [says(text)]} | fields
    return event(id, "ObservationEvent", tool_call_id=call, observation=observed)


TERMINAL = {"exit_code": 1, "working_dir": "/w", "prefix": "", "suffix": " (end)"}


def test_a_conversation_of_openhands_is_what_the_sdk_sends(read):
    prompt = event("s", "SystemPromptEvent", system_prompt=says("Be."), tools=[])
    reading = read(
        "openhands_sdk",
        [
            prompt | {"dynamic_context": says("Now.")},
            message("u", "user", "Go."),
            action("a", "r1", "Both."),
            action("b", "r1", "", "cat"),
            result("c", "a", "x"),
            result("d", "b", "y", is_error=True, metadata=TERMINAL),
            event("e", "AgentErrorEvent", tool_call_id="z", error="No tool."),
            event("f", "UserRejectObservation", tool_call_id="z", rejection_reason="Never."),
            message("g", "assistant", "Done."),
            event("h", "PauseEvent"),
        ],
    )
    assert reading.unread == {}
    failed = "[An error occurred during execution.]\ny (end)"
    failed += "\n[Current working directory: /w]\n[Command finished with exit code 1]"
    (step,) = reading.steps
    before = ["Be.\nNow.", "Go.", "Both.", "x", failed]
    assert texts(step) == [*before, "No tool.", "Action rejected: Never.", "Done."]
    assert [c["function"]["name"] for c in step.messages[2]["tool_calls"]] == ["ls", "cat"]


def test_a_condensation_forgets_events_and_puts_the_summary_in_their_place(read):
    lines = [message("u", "user", "Go."), message("a", "assistant", "One.")]
    lines += [message("v", "user", "On."), message("b", "assistant", "Two.")]
    forgotten = {"forgotten_event_ids": ["a", "v"], "summary": "In short.", "summary_offset": 1}
    lines += [event("c", "Condensation", **forgotten), message("d", "assistant", "Three.")]
    lines += [event("e", "ConversationErrorEvent", code="x", detail="No credit.")]
    reading = read("openhands_sdk", lines)
    assert reading.error == "No credit."
    assert contexts(reading) == [
        (None, ["Go.", "One.", "On.", "Two."], 0),
        (None, ["Go.", "In short.", "Two.", "Three."], 3),
    ]


def test_a_directory_of_events_is_one_conversation_and_token_events_are_exact(tmp_path):
    folder = tmp_path / "c"
    tokens = event("t", "TokenEvent", prompt_token_ids=[1, 2], response_token_ids=[3])
    lines = [message("u", "user", "Go."), message("a", "assistant", "One."), tokens]
    (folder / "events").mkdir(parents=True)
    (folder / "base_state.json").write_text("{}")
    for i, line in enumerate(lines):
        ((_, reading),) = read_all(FORMATS["openhands_sdk"], folder)[0] if i == 2 else ((0, 0),)
        assert i < 2 or contexts(reading) == [(None, ["Go.", "One."], 0)]
        (folder / "events" / f"event-{i}.json").write_text(json.dumps(line, indent=1))
    assert recognize(folder, FORMATS) == ["openhands_sdk"]
    ((run, reading),), _ = read_all(FORMATS["openhands_sdk"], folder)
    (step,) = reading.steps
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
    files = [*(harness_logs.parent / "harness_logs_2026" / "openhands_sdk").glob("litellm*")]
    if not files:
        pytest.skip("no log of a call")
    assert recognize(files[0], FORMATS) == ["openhands_llm"]
    ((_, reading),), _ = read_all(FORMATS["openhands_llm"], files[0])
    record = json.loads(files[0].read_text())
    (step,) = reading.steps
    assert reading.unread == {}
    assert len(step.messages) == len(record["messages"]) + 1
    assert step.messages[0]["content"] == record["messages"][0]["content"][0]["text"]
    call = record["response"]["choices"][0]["message"]["tool_calls"][0]["function"]
    arguments = step.messages[-1]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments) == json.loads(call["arguments"])
    names = [[t["function"]["name"] for t in tools] for tools in (step.tools, record["tools"])]
    assert names[0] == names[1]


def copilot(*records):
    """Events of Copilot: a kind, its data, and marks beside them."""
    events = [("session.start", {"sessionId": "s"}), *records, ("session.error", {"message": "X."})]
    return [
        {"type": kind, "id": f"{i}", "parentId": None, "timestamp": "t", "data": data, **marks}
        for i, (kind, data, *more) in enumerate(events)
        for marks in (more or [{}])
    ]


def told(text, **data):
    return ("assistant.message", {"content": text} | data)


TASK = {"toolCallId": "c", "name": "task", "arguments": {"prompt": "Look around."}}
STARTED = ("subagent.started", {"toolCallId": "c", "agentName": "explore"})
OF_X = {"agentId": "x"}


@pytest.mark.parametrize(
    "seen",
    [
        [STARTED, told("Seen.", parentToolCallId="c")],
        [
            ("tool.execution_start", {"toolCallId": "c", "arguments": TASK["arguments"]}),
            (*STARTED, OF_X),
            ("user.message", {"content": "Look around."}, OF_X),
            (*told("Seen."), OF_X),
        ],
    ],
)
def test_sub_agents_of_copilot_have_the_prompt_of_their_call(seen, read):
    question = [("user.message", {"content": "Go."}), told("One.", toolRequests=[TASK])]
    done = ("tool.execution_complete", {"toolCallId": "c", "result": {"content": "Seen."}})
    reading = read("copilot_cli", copilot(*question, *seen, done, told("Two.")))
    assert contexts(reading) == [
        (None, ["Go.", "One.", "Seen.", "Two."], 0),
        ("explore", ["Look around.", "Seen."], 0),
    ]
    assert (reading.error, reading.unread) == ("X.", {})


def test_a_rewind_of_copilot_to_an_answer_keeps_what_was_before_it(read):
    lines = copilot(
        ("user.message", {"content": "Go."}),
        told("One."),
        told("Two."),
        ("session.snapshot_rewind", {"upToEventId": "3"}),
        ("assistant.reasoning", {"content": "Hm."}),
        told("Three."),
    )
    reading = read("copilot_cli", lines)
    assert reading.steps[-1].messages[-1]["reasoning_content"] == "Hm."
    assert contexts(reading) == [
        (None, ["Go.", "One.", "Two."], 0),
        (None, ["Go.", "One.", "Three."], 2),
    ]


def test_a_context_of_copilot_that_was_cleared_is_not_what_the_next_answer_saw(read):
    first = [("user.message", {"content": "Go."}), told("One.")]
    second = [("user.message", {"content": "On."}), told("Two.")]
    cleared = ("session.context_cleared", {"messagesCleared": 2})
    reading = read("copilot_cli", copilot(*first, cleared, *second))
    assert contexts(reading) == [(None, ["Go.", "One."], 0), (None, ["On.", "Two."], 0)]
    assert reading.unread == {}


def test_calls_and_results_of_cursor_without_ids_belong_together_in_order(read):
    calls = [{"type": "tool_use", "name": name, "input": {}} for name in ("ls", "cat")]
    results = [{"type": "tool-result", "name": "x", "content": text} for text in "ab"]
    contents = {"user": [says("Go.")], "assistant": calls, "user ": results}
    lines = [{"role": r.strip(), "message": {"content": c}} for r, c in contents.items()]
    _, reply, *answers = read("cursor", lines).steps[0].messages
    assert [m["tool_call_id"] for m in answers] == [c["id"] for c in reply["tool_calls"]]
    assert [m["content"] for m in answers] == ["a", "b"]
