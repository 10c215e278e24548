"""Every role, text, thought, tool name and argument of a text log is in its trajectory's tokens.

In order, to the last answer; or the record was refused by name. Logs are read by `source_facts`,
which shares no code with the adapters.
"""

import contextlib
import io
import json
import pathlib
import sqlite3
import tempfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import rollout_io
from rollout_io.conversion.text import Retokenizer
from rollout_io.formats.detect import load_formats, recognize
from rollout_io.retokenize.chat_template import TEMPLATES
from schemas.errors import RolloutError
from tests.helpers.examples import examples
from tests.helpers.qwen import chat_template_of, save_qwen3
from tests.helpers.source_facts import READERS, facts_of, joined, missing_fact, read_source

pytestmark = pytest.mark.model
CHOICES = (None, *TEMPLATES)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return save_qwen3(tmp_path_factory.mktemp("qwen3"), chat_template_of("qwen3"))


@pytest.fixture
def directory_of(smollm2_dir, request):
    return lambda name: smollm2_dir if name == "smollm2" else request.getfixturevalue("qwen3")


def converted(path, out, **choices):
    """The source, tokens and messages of each trajectory's rows as text, and what was refused."""
    try:
        summary = rollout_io.convert([path], out, on_error="skip", **choices).summary
    except RolloutError:
        summary = None
    names = {"directory": choices["tokenizer"], "chat_template": choices["chat_template"]}
    decode = Retokenizer(**names).tokenizer.decode
    texts = {}
    for row in rollout_io.read(out).to_pylist() if summary else ():
        said = decode([*row["prompt_token_ids"], *row["response_ids"]])
        chat = spelled(json.loads(row["messages"]))
        texts.setdefault(row["trajectory_id"], []).append((row["source"], said, chat))
    file = out.with_name(f"{out.name}.rejected.jsonl")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    rejected = [json.loads(line) for line in lines]
    assert summary is None or summary.num_records == summary.num_written + len(rejected)
    return list(texts.values()), rejected


def check_file(path, name, out, **choices):
    expected = read_source(name, path)
    trajectories, rejected = converted(path, out, format=name, **choices)
    assert all(line["rule"] for line in rejected)
    for place, facts in expected.items():
        own = [rows for rows in trajectories if is_of(rows[0][0], place)]
        if not own:
            assert rejected, place
            assert any(is_of(line["source"], place) for line in rejected), (place, rejected[0])
        for rows in own:
            assert missing_fact(facts, "".join(said for _, said, _ in rows)) is None, place
            assert missing_fact(facts, "".join(chat for _, _, chat in rows)) is None, place
    return len(trajectories)


def spelled(messages):
    """Roles, reasoning, contents, names and arguments of a row's messages, in order."""
    return "\n".join(piece for message in messages for piece in pieces(message))


def pieces(message):
    yield "<|im_start|>" + message["role"]
    yield message.get("reasoning_content", "")
    yield message["content"] or ""
    for call in message.get("tool_calls", ()):
        yield call["function"]["name"]
        yield call["function"]["arguments"]


def is_of(source, place):
    return source == place or source.startswith((f"{place},", f"{place}:"))


def real_files(logs):
    """The logs of text formats, with their formats."""
    adapters = load_formats().adapters
    for path in sorted(p for p in logs.rglob("*") if p.is_file()):
        found = recognize(path, adapters)
        if len(found) == 1 and found[0] in READERS:
            yield path, found[0]


@pytest.mark.slow
@pytest.mark.parametrize("template", [None, "chatml_tools_thinking"])
def test_small_real_logs_keep_what_they_say(harness_logs, directory_of, tmp_path, template):
    names = ["gemini_cli/gemini-cli-trajectory.json", "swe_agent/function_calling_simple.traj"]
    names += ["claude_code/simonw.sample_session.jsonl", "mini_swe_agent/github_issue.traj.json"]
    for i, name in enumerate(names):
        path, choices = harness_logs / name, {"chat_template": template}
        choices["tokenizer"] = str(directory_of("smollm2"))
        num = check_file(path, name.split("/")[0], tmp_path / f"{i}", **choices)
        assert num == 1 or template is None


@pytest.mark.slow
def test_all_real_logs_keep_their_roles_tokens_and_messages(harness_logs, directory_of, tmp_path):
    choices = {"tokenizer": str(directory_of("smollm2")), "chat_template": "chatml_tools_thinking"}
    counts = [
        check_file(path, name, tmp_path / f"{i}", **choices)
        for i, (path, name) in enumerate(real_files(harness_logs))
    ]
    assert sum(counts) > 60


@pytest.mark.nightly
@pytest.mark.parametrize("tokenizer", ["smollm2", "qwen3"])
@pytest.mark.parametrize("template", CHOICES)
def test_all_real_logs_keep_what_they_say(
    harness_logs, directory_of, tmp_path, tokenizer, template
):
    choices = {"tokenizer": str(directory_of(tokenizer)), "chat_template": template}
    counts = [
        check_file(path, name, tmp_path / f"{i}", **choices)
        for i, (path, name) in enumerate(real_files(harness_logs))
    ]
    assert len(counts) > 15
    if template == "chatml_tools_thinking":
        assert sum(counts) > 60


WORD = st.sampled_from(
    ["search", "ls", "I will search now", "zebra", "é中", 'a "b"\n{c}', "4", "x"]
)
SCALAR = st.one_of(WORD, st.integers(-3, 10**20), st.booleans(), st.none(), st.just(1.5))
ARGUMENTS = st.dictionaries(
    st.sampled_from(["q", "path", "force"]), st.one_of(SCALAR, st.lists(SCALAR, max_size=2))
)


@st.composite
def conversations(draw):
    """OpenAI-style messages, each tool call with its result."""
    messages = [{"role": "user", "content": draw(WORD)}]
    if draw(st.booleans()):
        messages.insert(0, {"role": "system", "content": draw(WORD)})
    for _ in range(draw(st.integers(1, 3))):
        names = draw(st.lists(st.sampled_from(["search", "ls", "bash"]), max_size=2))
        calls = [
            {"id": f"c{len(messages)}{i}", "function": {"name": name, "arguments": draw(ARGUMENTS)}}
            for i, name in enumerate(names)
        ]
        said = {
            "role": "assistant",
            "content": draw(st.one_of(WORD, st.just(""))),
            "tool_calls": calls,
        }
        messages.append(said | draw(st.sampled_from([{}, {"reasoning_content": "2 + 2"}])))
        messages += [
            {"role": "tool", "content": draw(WORD), "tool_call_id": c["id"]} for c in calls
        ]
        messages += [{"role": "user", "content": draw(WORD)}] if draw(st.booleans()) else []
    return messages


def _document(value):
    return json.dumps(value, indent=2)


def _openai_messages(messages):
    return json.dumps({"messages": messages})


def _hermes(messages):
    logged = [m | {"id": i, "active": 1} for i, m in enumerate(messages)]
    session = {"id": "h", "source": "cli", "system_prompt": None, "message_count": len(messages)}
    return json.dumps(session | {"messages": logged})


def _session_traces(messages):
    names = {
        "reasoning_content": "reasoningContent",
        "tool_calls": "toolCalls",
        "tool_call_id": "toolCallId",
    }
    logged = [{names.get(name, name): v for name, v in m.items()} for m in messages]
    head = {"type": "session", "harness": "mine", "id": "s", "name": "Listing"}
    lines = [head, *({"type": "message", "message": m} for m in logged)]
    return "\n".join(map(json.dumps, lines))


def _verifiers(messages):
    calls = [m | {"tool_calls": [json.dumps(c) for c in m.get("tool_calls", [])]} for m in messages]
    return json.dumps({"id": 0, "prompt": calls[:1], "completion": calls[1:], "reward": 1.0})


def _prime_hosted(messages):
    texts = {"prompt": json.dumps(messages[:1]), "completion": json.dumps(messages[1:])}
    return json.dumps({"run_id": "r", "sample_id": 1, "problem_id": 1, "step": 0, **texts})


def _mini_swe_agent(messages):
    return _document({"trajectory_format": "mini-swe-agent-1", "messages": messages})


def _swe_agent(messages):
    history = [m | {"agent": "main"} for m in messages]
    return _document({"trajectory": [], "history": history, "info": {}})


def _recorded_after(messages):
    history = [m | {"agent": "main"} for m in messages]
    ends = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    steps = [
        {"response": messages[i]["content"], "messages": history[:end]}
        for i, end in zip(ends, [*ends[1:], len(history)], strict=True)
    ]
    return _document({"trajectory": steps, "history": history, "info": {}})


def _inspect(message):
    calls = [
        {"id": c["id"], **c["function"], "type": "function"} for c in message.get("tool_calls", [])
    ]
    calls = [{"id": c["id"], "function": c["name"], "arguments": c["arguments"]} for c in calls]
    thought = message.get("reasoning_content")
    parts = [{"type": "reasoning", "reasoning": thought}] if thought else []
    parts += [{"type": "text", "text": message["content"]}] if message["content"] else []
    made = {"role": message["role"], "content": parts, "tool_calls": calls}
    return made | ({"tool_call_id": message["tool_call_id"]} if "tool_call_id" in message else {})


def _inspect_ai(messages):
    made = [_inspect(message) for message in messages]
    events = [
        {"event": "model", "input": made[:i], "output": {"choices": [{"message": message}]}}
        for i, message in enumerate(made)
        if message["role"] == "assistant"
    ]
    sample = {"id": 1, "epoch": 1, "messages": made, "events": events}
    return _document(
        {"version": 2, "status": "success", "eval": {"task": "t"}, "samples": [sample]}
    )


def _gemini_messages(messages):
    results = {m["tool_call_id"]: m["content"] for m in messages if m["role"] == "tool"}
    made = []
    for m in messages:
        if m["role"] == "tool":
            continue
        message = {"id": f"{len(made)}", "type": "user", "content": m["content"]}
        if m["role"] == "assistant":
            calls = [
                {"id": c["id"], "name": c["function"]["name"], "args": c["function"]["arguments"]}
                | {"result": [{"functionResponse": {"response": {"output": results[c["id"]]}}}]}
                for c in m.get("tool_calls", [])
            ]
            thoughts = [{"subject": m["reasoning_content"]}] if "reasoning_content" in m else []
            message |= {"type": "gemini", "toolCalls": calls, "thoughts": thoughts}
        made.append(message)
    return made


def _gemini_cli(messages):
    document = {"sessionId": "s", "projectHash": "p", "messages": _gemini_messages(messages)}
    return _document(document)


def _gemini_lines(messages):
    made = _gemini_messages(messages)
    head = {"sessionId": "s", "projectHash": "p", "startTime": "t", "kind": "main"}
    first = [{"$set": {"messages": made[:1]}}]
    first += [{"id": "x", "type": "user", "content": "Taken back."}, {"$rewindTo": "x"}]
    later = [
        line
        for m in made[1:]
        for line in (m | {"toolCalls": []}, {"$set": {"lastUpdated": "t"}}, m)
    ]
    return "\n".join(map(json.dumps, [head, *first, *later]))


def _codex_cli(messages):
    return "\n".join(
        json.dumps({"timestamp": "t", "type": "response_item", "payload": item})
        for item in _items(messages)
    )


def _nemo_gym(messages):
    start = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
    response = {"id": "r", "object": "response", "output": _items(messages[start:])}
    row = {"responses_create_params": {"input": _items(messages[:start])}, "response": response}
    return json.dumps(row | {"_ng_task_index": 0, "_ng_rollout_index": 0, "reward": 1.0})


def _items(messages):
    """Items of OpenAI's Responses API."""
    items = []
    for m in messages:
        if m["role"] == "tool":
            items.append(
                {
                    "type": "function_call_output",
                    "call_id": m["tool_call_id"],
                    "output": m["content"],
                }
            )
            continue
        if "reasoning_content" in m:
            items.append(
                {
                    "type": "reasoning",
                    "summary": [{"type": "summary_text", "text": m["reasoning_content"]}],
                }
            )
        items.append(
            {
                "type": "message",
                "role": m["role"],
                "content": [{"type": "output_text", "text": m["content"]}],
            }
        )
        for c in m.get("tool_calls", []):
            called = {"call_id": c["id"], "name": c["function"]["name"]}
            items.append(
                {
                    "type": "function_call",
                    **called,
                    "arguments": json.dumps(c["function"]["arguments"], indent=1),
                }
            )
    return items


def _claude_code(messages):
    lines = []
    for i, m in enumerate(messages):
        blocks = (
            [{"type": "thinking", "thinking": m["reasoning_content"]}]
            if "reasoning_content" in m
            else []
        )
        blocks += [{"type": "text", "text": m["content"]}]
        blocks += [
            {
                "type": "tool_use",
                "id": c["id"],
                "name": c["function"]["name"],
                "input": c["function"]["arguments"],
            }
            for c in m.get("tool_calls", [])
        ]
        if m["role"] == "tool":
            blocks = [
                {"type": "tool_result", "tool_use_id": m["tool_call_id"], "content": m["content"]}
            ]
        kind = "assistant" if m["role"] == "assistant" else "user"
        lines.append(
            {
                "type": kind,
                "uuid": f"{i}",
                "sessionId": "s",
                "message": {"id": f"m{i}", "role": kind, "content": blocks},
            }
        )
    return "\n".join(map(json.dumps, lines))


def _openhands(messages):
    events = []
    for m in messages:
        if m["role"] == "assistant":
            reply = m | {
                "tool_calls": [
                    c
                    | {
                        "function": c["function"]
                        | {"arguments": json.dumps(c["function"]["arguments"])}
                    }
                    for c in m["tool_calls"]
                ]
            }
            response = {"id": f"r{len(events)}", "choices": [{"message": reply}]}
            events.append(
                {
                    "source": "agent",
                    "action": "run",
                    "args": {},
                    "tool_call_metadata": {"model_response": response},
                }
            )
        elif m["role"] == "tool":
            events.append(
                {
                    "source": "agent",
                    "observation": "run",
                    "content": m["content"],
                    "tool_call_metadata": {"tool_call_id": m["tool_call_id"]},
                }
            )
        else:
            action = {"system": "system"}.get(m["role"], "message")
            events.append({"source": "user", "action": action, "args": {"content": m["content"]}})
    return _document([{"id": i} | event for i, event in enumerate(events)])


def _rllm(messages):
    ends = [i for i, m in enumerate(messages, 1) if m["role"] == "assistant"]
    steps = [
        {"prompt_ids": [], "response_ids": [], "logprobs": [], "chat_completions": messages[:end]}
        for end in ends
    ]
    trajectory = {"name": "solver", "reward": 1.0, "steps": steps}
    episode = {"id": "t:0", "task": {"id": "t"}, "termination_reason": "env_done"}
    return _document(episode | {"is_correct": True, "trajectories": [trajectory]})


def _verifiers_traces(messages):
    nodes = []
    for i, m in enumerate(messages):
        calls = [
            {"id": c["id"], **c["function"], "arguments": json.dumps(c["function"]["arguments"])}
            for c in m.get("tool_calls", [])
        ]
        message = m | ({"tool_calls": calls} if calls else {})
        nodes.append({"message": message, "sampled": m["role"] == "assistant"})
        nodes[-1] |= {"parent": i - 1} if i else {}
    trace = {"agent": {"name": "agent", "trainable": True}, "nodes": nodes, "rewards": {}}
    trace |= {"ok": True, "errors": []}
    task = {"type": "T", "data": {}, "key": "k1"}
    return json.dumps({"id": "e", "task": task, "ok": True, "errors": [], "traces": [trace]})


def _trl(messages):
    """TRL's file gives all calls one struct of arguments, so only text is written."""
    said = [{k: v for k, v in m.items() if k in ("role", "content")} for m in messages]
    table = pa.table({"step": [1], "prompt": [said[:1]], "completion": [said[1:]], "score": [1.0]})
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def _chats(messages):
    kinds = {"user": "human", "assistant": "ai"}
    found = []
    for m in messages:
        calls = [
            {"id": c.get("id"), "name": c["function"]["name"], "args": c["function"]["arguments"]}
            for c in m.get("tool_calls", ())
        ]
        found.append(
            {"type": kinds.get(m["role"], m["role"]), "content": m["content"], "tool_calls": calls}
        )
        found[-1] |= {"tool_call_id": m["tool_call_id"]} if "tool_call_id" in m else {}
        thought = {"reasoning_content": m.get("reasoning_content")}
        found[-1] |= {"additional_kwargs": thought} if m["role"] == "assistant" else {}
    return json.dumps({"messages": found})


def _traces(messages):
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt, answer = (json.dumps(each) for each in (messages[:i], message))
        attributes = {
            "openinference.span.kind": "LLM",
            "input.value": prompt,
            "output.value": answer,
        }
        context = {"trace_id": "0xt", "span_id": f"0x{i + 1}"}
        spans.append({"context": context, "start_time": i + 1, "attributes": attributes})
    return "\n".join(map(json.dumps, spans))


def _chain(records, key="id", parent="parentId"):
    """Records of a tree with one branch, as lines."""
    before, lines = None, []
    for i, record in enumerate(records):
        lines.append(json.dumps(record | {key: f"{i}", parent: before}))
        before = f"{i}"
    return "\n".join(lines)


def _pi_messages(messages):
    for m in messages:
        blocks = [{"type": "text", "text": m["content"]}] if m["content"] else []
        if "reasoning_content" in m:
            blocks.insert(0, {"type": "thinking", "thinking": m["reasoning_content"]})
        blocks += [
            {"type": "toolCall", "id": c["id"], **c["function"]} for c in m.get("tool_calls", ())
        ]
        role = m["role"].replace("tool", "toolResult")
        yield {"role": role, "content": blocks, "toolCallId": m.get("tool_call_id")}


def _pi(messages):
    head = {"type": "session", "id": "s", "version": 3, "timestamp": "t", "cwd": "/"}
    records = [{"type": "message", "message": m} for m in _pi_messages(messages)]
    return json.dumps(head) + "\n" + _chain(records)


def _openclaw(messages):
    event = {"sessionKey": "agent:main:main", "agentId": "main"}
    start = event | {"type": "agent.start", "prompt": "x"}
    end = event | {"type": "agent.end", "success": True, "messages": [*_pi_messages(messages)]}
    return "\n".join(map(json.dumps, [start, end]))


def _qwen_code(messages):
    records = []
    for m in messages:
        thought = m.get("reasoning_content")
        parts = [{"text": thought, "thought": True}] if thought else []
        parts += [{"text": m["content"]}] if m["content"] else []
        parts += [
            {"functionCall": {"id": c["id"], "name": f["name"], "args": f["arguments"]}}
            for c in m.get("tool_calls", ())
            for f in [c["function"]]
        ]
        if m["role"] == "tool":
            answer = {"id": m["tool_call_id"], "response": {"output": m["content"]}}
            parts = [{"functionResponse": answer}]
        kind = m["role"].replace("tool", "tool_result")
        role = "model" if kind == "assistant" else "user"
        message = {"role": role, "parts": parts}
        records.append({"type": kind, "sessionId": "s", "message": message})
    return _chain(records, "uuid", "parentUuid")


def _kimi_cli(messages):
    lines = [{"type": "metadata", "protocol_version": "1.4"}]
    for i, m in enumerate(messages):
        content = [{"type": "text", "text": m["content"]}]
        events = []
        if m["role"] == "system":
            lines.append({"type": "config.update", "systemPrompt": m["content"]})
        elif m["role"] == "user":
            said = {"role": "user", "content": content, "toolCalls": []}
            lines.append({"type": "context.append_message", "message": said})
        elif m["role"] == "tool":
            result = {"output": m["content"]}
            events = [{"type": "tool.result", "toolCallId": m["tool_call_id"], "result": result}]
        else:
            thought = {"type": "think", "think": m.get("reasoning_content", "")}
            events = [{"type": "step.begin", "uuid": f"{i}"}]
            events += [
                {"type": "content.part", "stepUuid": f"{i}", "part": part}
                for part in (thought, *content)
            ]
            events += [
                {"type": "tool.call", "stepUuid": f"{i}", "toolCallId": c["id"], "name": f["name"]}
                | {"args": f["arguments"]}
                for c in m.get("tool_calls", ())
                for f in [c["function"]]
            ]
        lines += [{"type": "context.append_loop_event", "event": e, "time": 1} for e in events]
    return "\n".join(map(json.dumps, lines))


def opencode_tables(messages):
    """Rows of OpenCode's database; `data` is decoded."""
    tables = {"session": [{"id": "s", "parent_id": None, "directory": "/"}]}
    tables |= {"message": [], "part": []}
    results = {m["tool_call_id"]: m["content"] for m in messages if m["role"] == "tool"}
    for i, m in enumerate(messages):
        if m["role"] == "tool":
            continue
        row = {"session_id": "s", "time_created": i, "time_updated": i}
        tables["message"].append({"id": f"m{i}", **row, "data": {"role": m["role"]}})
        parts = [{"type": "text", "text": m["content"]}]
        if "reasoning_content" in m:
            parts.insert(0, {"type": "reasoning", "text": m["reasoning_content"]})
        for c in m.get("tool_calls", ()):
            state = {"status": "completed", "input": c["function"]["arguments"]}
            state |= {"output": results[c["id"]]}
            call = {"callID": c["id"], "tool": c["function"]["name"], "state": state}
            parts.append({"type": "tool"} | call)
        tables["part"] += [
            {"id": f"p{i:03}{j}", "message_id": f"m{i}", **row, "data": part}
            for j, part in enumerate(parts)
        ]
    return tables


def save_opencode(path, tables, columns_of=None):
    """Write a database, by default OpenCode's.

    Raises:
        ValueError: A database has no place for such tables.
    """
    path.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(path)) as database:
        try:
            for name, columns in (columns_of or OPENCODE_TABLES).items():
                database.execute(f"CREATE TABLE {name} ({', '.join(columns)})")
                for row in tables.get(name, ()):
                    texts = {k: json.dumps(v) if k in JSON else v for k, v in row.items()}
                    values = [texts.get(column) for column in columns]
                    marks = ", ".join("?" * len(columns))
                    database.execute(f"INSERT INTO {name} VALUES ({marks})", values)
            database.commit()
        except (sqlite3.Error, AttributeError) as error:
            raise ValueError(error) from None


JSON = ("data", "content_json", "metadata_json")
"""Columns of JSON."""
GOOSE_TABLES = {
    "sessions": ("id", "parent_session_id", "working_dir"),
    "messages": ("id", "session_id", "role", "content_json", "created_timestamp", "metadata_json"),
}
OPENCODE_TABLES = {
    "session": ("id", "parent_id", "directory"),
    "message": ("id", "session_id", "time_created", "time_updated", "data"),
    "part": ("id", "message_id", "session_id", "time_created", "time_updated", "data"),
}


def _goose_parts(message):
    if message["role"] == "tool":
        value = {"content": [{"type": "text", "text": message["content"]}]}
        yield {
            "type": "toolResponse",
            "id": message["tool_call_id"],
            "toolResult": {"value": value},
        }
        return
    if message.get("reasoning_content"):
        yield {"type": "thinking", "thinking": message["reasoning_content"]}
    if message["content"]:
        yield {"type": "text", "text": message["content"]}
    for call in message.get("tool_calls", ()):
        value = {k: call["function"][k] for k in ("name", "arguments")}
        yield {"type": "toolRequest", "id": call["id"], "toolCall": {"value": value}}


def _goose(messages):
    rows = [
        {
            "id": i,
            "session_id": "s",
            "role": m["role"].replace("tool", "user"),
            "content_json": [*_goose_parts(m)],
            "created_timestamp": i,
            "metadata_json": {"userVisible": True, "agentVisible": True},
        }
        for i, m in enumerate(messages)
    ]
    tables = {"sessions": [{"id": "s", "working_dir": "/"}], "messages": rows}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "sessions.db"
        save_opencode(path, tables, GOOSE_TABLES)
        return path.read_bytes()


def _cline(messages):
    return json.dumps([m | {"ts": 1} for m in _blocks(messages)], indent=1)


def _opencode(messages):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "opencode.db"
        save_opencode(path, opencode_tables(messages))
        return path.read_bytes()


def _openhands_sdk(messages):
    events = []
    for i, m in enumerate(messages):
        text = [{"type": "text", "text": m["content"]}]
        thought = {"reasoning_content": m.get("reasoning_content")}
        calls = m.get("tool_calls", ())
        if m["role"] == "system":
            events.append({"kind": "SystemPromptEvent", "system_prompt": text[0], "tools": []})
        elif m["role"] == "tool":
            result = {"tool_name": "x", "tool_call_id": m["tool_call_id"]}
            events.append({"kind": "ObservationEvent", "observation": {"content": text}} | result)
        elif not calls:
            said = {"role": m["role"], "content": text} | thought
            events.append({"kind": "MessageEvent", "llm_message": said})
        for j, c in enumerate(calls):
            call = {"id": c["id"], "name": c["function"]["name"]}
            call |= {"arguments": json.dumps(c["function"]["arguments"])}
            first = {"thought": text, **thought} if j == 0 else {"thought": []}
            action = {"kind": "ActionEvent", "tool_call": call, "llm_response_id": f"r{i}"}
            events.append(action | first)
    place = {"source": "agent", "timestamp": "t"}
    return "\n".join(json.dumps({"id": f"{i}", **place, **e}) for i, e in enumerate(events))


def _openhands_llm(messages):
    said = [bool(m["content"] or m.get("tool_calls")) for m in messages]
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    end = max([i for i in answers if said[i]] or answers)
    sent = [
        m | {"tool_calls": [_as_openai(c) for c in m["tool_calls"]]} if "tool_calls" in m else m
        for m in messages
    ]
    response = {"choices": [{"message": sent[end]}]}
    record = {"messages": sent[:end], "response": response, "timestamp": 1.5, "latency_sec": 1}
    return _document(record)


def _as_openai(call):
    function = call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}
    return call | {"type": "function", "function": function}


def _copilot_cli(messages):
    start = {"sessionId": "s", "version": 1, "context": {"cwd": "/"}}
    records = [{"type": "session.start", "data": start}]
    for m in messages:
        data = {"content": m["content"]}
        kind = {"tool": "tool.execution_complete"}.get(m["role"], f"{m['role']}.message")
        if m["role"] == "tool":
            data = {"toolCallId": m["tool_call_id"], "success": True, "result": data}
        if m["role"] == "assistant":
            data["reasoningText"] = m.get("reasoning_content")
            data["toolRequests"] = [
                {"toolCallId": c["id"], "type": "function", **c["function"]}
                for c in m.get("tool_calls", ())
            ]
        records.append({"type": kind, "data": data})
    return _chain(records)


def _anthropic(m):
    """The content of a message as blocks of Anthropic's API."""
    if m["role"] == "tool":
        result = {"type": "tool_result", "tool_use_id": m["tool_call_id"]}
        return [result | {"content": m["content"]}]
    thought = m.get("reasoning_content")
    blocks = [{"type": "thinking", "thinking": thought}] if thought else []
    blocks += [{"type": "text", "text": m["content"]}] if m["content"] else []
    return blocks + [
        {"type": "tool_use", "id": c["id"], "name": f["name"], "input": f["arguments"]}
        for c in m.get("tool_calls", ())
        for f in [c["function"]]
    ]


def _blocks(messages):
    for m in messages:
        role = "assistant" if m["role"] == "assistant" else "user"
        yield {"role": role, "content": _anthropic(m)}


def _droid(messages):
    records = [{"type": "message", "message": m} for m in _blocks(messages)]
    return json.dumps({"type": "session_start", "id": "s", "cwd": "/"}) + "\n" + _chain(records)


def _cursor(messages):
    lines = [{"role": m["role"], "message": {"content": m["content"]}} for m in _blocks(messages)]
    return "\n".join(map(json.dumps, lines))


def _grok_cli(messages):
    lines = []
    for m in messages:
        if m.get("reasoning_content"):
            summary = [{"type": "summary_text", "text": m["reasoning_content"]}]
            lines.append({"type": "reasoning", "id": "r", "summary": summary})
        line = {"type": m["role"], "content": m["content"]}
        if m["role"] == "tool":
            line |= {"type": "tool_result", "tool_call_id": m["tool_call_id"]}
        if m["role"] == "assistant":
            calls = [{"id": c["id"], **_as_openai(c)["function"]} for c in m.get("tool_calls", ())]
            line |= {"tool_calls": calls, "model_id": "g"}
        lines.append(line)
    return "\n".join(map(json.dumps, lines))


WRITERS = {
    "chats": (_chats, "a.jsonl"),
    "claude_code": (_claude_code, "a.jsonl"),
    "cline": (_cline, "api_conversation_history.json"),
    "codex_cli": (_codex_cli, "a.jsonl"),
    "copilot_cli": (_copilot_cli, "a.jsonl"),
    "cursor": (_cursor, "a.jsonl"),
    "droid": (_droid, "a.jsonl"),
    "gemini_cli": (_gemini_cli, "a.json"),
    "gemini_cli, lines": (_gemini_lines, "a.jsonl"),
    "goose": (_goose, "sessions.db"),
    "grok_cli": (_grok_cli, "a.jsonl"),
    "hermes": (_hermes, "a.jsonl"),
    "inspect_ai": (_inspect_ai, "a.json"),
    "kimi_cli": (_kimi_cli, "a.jsonl"),
    "mini_swe_agent": (_mini_swe_agent, "a.traj.json"),
    "openai_messages": (_openai_messages, "a.jsonl"),
    "openclaw": (_openclaw, "a.jsonl"),
    "opencode": (_opencode, "opencode.db"),
    "openhands": (_openhands, "a.events.json"),
    "openhands_llm": (_openhands_llm, "a.json"),
    "openhands_sdk": (_openhands_sdk, "a.jsonl"),
    "pi": (_pi, "a.jsonl"),
    "prime_hosted": (_prime_hosted, "a.jsonl"),
    "qwen_code": (_qwen_code, "a.jsonl"),
    "session_traces": (_session_traces, "a.jsonl"),
    "swe_agent": (_swe_agent, "a.traj"),
    "swe_agent, recorded after": (_recorded_after, "a.traj"),
    "traces": (_traces, "a.jsonl"),
    "verifiers": (_verifiers, "a.jsonl"),
}
"""Logs of one conversation as files of text formats: who writes them, and their names."""

EXACT_FORMATS = {
    "nemo_gym": (_nemo_gym, "a.jsonl"),
    "rllm": (_rllm, "episode_0.json"),
    "trl": (_trl, "completions_00001.parquet"),
    "verifiers, traces": (_verifiers_traces, "traces.jsonl"),
}
"""The same for formats that hold ids too, here without them."""

ALL_FORMATS = WRITERS | EXACT_FORMATS
TEXT_ALONE = ("trl",)
ANSWERS_JOIN = ("codex_cli", "nemo_gym")
SYSTEM_IS_USER = (
    "claude_code",
    "cline",
    "cursor",
    "droid",
    "gemini_cli",
    "gemini_cli, lines",
    "qwen_code",
)
SAID = {"role": "assistant", "content": "search", "tool_calls": []}
TWO_ANSWERS = [{"role": "user", "content": "search"}, SAID, SAID]
NOTHING = {"role": "assistant", "content": "", "tool_calls": []}
CALLS = SAID | {"tool_calls": [{"id": "c0", "function": {"name": "search", "arguments": {}}}]}
RESULT = {"role": "tool", "content": "search", "tool_call_id": "c0"}
NO_LAST_ANSWER = [TWO_ANSWERS[0], CALLS, RESULT, NOTHING, NOTHING]
rare = settings(deadline=None, max_examples=4, suppress_health_check=list(HealthCheck))


def check_made(name, messages, out, tokenizer, template):
    write, file = ALL_FORMATS[name]
    if name in SYSTEM_IS_USER:
        messages = [m | {"role": m["role"].replace("system", "user")} for m in messages]
    if name in TEXT_ALONE:
        messages = [
            {"role": m["role"], "content": m["content"], "tool_calls": []}
            for m in messages
            if m["role"] != "tool"
        ]
    path = out.with_suffix("") / file
    path.parent.mkdir()
    content = write(messages)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    choices = {"tokenizer": str(tokenizer), "chat_template": template, "format": name.split(",")[0]}
    trajectories, rejected = converted(path, out, **choices)
    expected = facts_of(joined(messages) if name in ANSWERS_JOIN else messages)
    for rows in trajectories:
        assert missing_fact(expected, "".join(said for _, said, _ in rows)) is None
        assert missing_fact(expected, "".join(chat for _, _, chat in rows)) is None
        assert len(rows) == 1
    says = any(
        m["role"] == "assistant" and (m["content"] or m["tool_calls"] or "reasoning_content" in m)
        for m in messages
    )
    if template == "chatml_tools_thinking" and says:
        assert [line["rule"] for line in rejected] == []
        assert len(trajectories) == 1
    assert trajectories or rejected


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL_FORMATS)
def test_a_conversation_in_any_format_keeps_what_it_says(name, smollm2_dir, tmp_path_factory):
    @rare
    @given(conversations())
    @example(TWO_ANSWERS)
    @example(NO_LAST_ANSWER)
    def holds(messages):
        out = tmp_path_factory.mktemp("made") / "ds.dir"
        check_made(name, messages, out, smollm2_dir, "chatml_tools_thinking")

    holds()


@pytest.mark.nightly
@pytest.mark.parametrize("tokenizer", ["smollm2", "qwen3"])
@pytest.mark.parametrize("template", CHOICES)
@pytest.mark.parametrize("name", ALL_FORMATS)
def test_any_template_keeps_a_conversation_or_is_refused(
    name, template, tokenizer, directory_of, tmp_path_factory
):
    @settings(rare, max_examples=examples(20))
    @given(conversations())
    def holds(messages):
        out = tmp_path_factory.mktemp("made") / "ds.dir"
        check_made(name, messages, out, directory_of(tokenizer), template)

    holds()
