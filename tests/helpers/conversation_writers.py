"""Writers of logs: each writes OpenAI-style messages as one program logs such a conversation."""

import contextlib
import io
import json
import pathlib
import sqlite3
import tempfile

import pyarrow as pa
import pyarrow.parquet as pq

from tests.helpers.source_facts import facts_of, joined


def lines(records):
    return "\n".join(map(json.dumps, records))


def document(value):
    return json.dumps(value, indent=2)


def chain(records, key="id", parent="parentId"):
    """Records of a tree with one branch, as lines."""
    names = [None, *map(str, range(len(records)))]
    return lines(r | {key: names[i + 1], parent: names[i]} for i, r in enumerate(records))


def calls_of(message):
    """(id, name, arguments) of each tool call of a message."""
    calls = message.get("tool_calls", ())
    return [(c.get("id"), c["function"]["name"], c["function"]["arguments"]) for c in calls]


def results_in(messages):
    return {m["tool_call_id"]: m["content"] for m in messages if m["role"] == "tool"}


def text(value, kind="text"):
    return {"type": kind, "text": value}


def with_json(message):
    """A message whose calls have arguments as JSON text, as OpenAI's API has them."""
    calls = [
        {"id": c, "type": "function", "function": {"name": n, "arguments": json.dumps(a)}}
        for c, n, a in calls_of(message)
    ]
    return message | ({"tool_calls": calls} if "tool_calls" in message else {})


def blocks(m):
    """The content of a message as blocks of Anthropic's API."""
    if m["role"] == "tool":
        result = {"type": "tool_result", "tool_use_id": m["tool_call_id"]}
        return [result | {"content": m["content"]}]
    thought = m.get("reasoning_content")
    parts = [{"type": "thinking", "thinking": thought}] if thought else []
    parts += [text(m["content"])] if m["content"] else []
    return parts + [{"type": "tool_use", "id": c, "name": n, "input": a} for c, n, a in calls_of(m)]


def in_blocks(messages):
    for m in messages:
        yield {"role": m["role"].replace("tool", "user"), "content": blocks(m)}


def items(messages):
    """Items of OpenAI's Responses API."""
    for m in messages:
        if m["role"] == "tool":
            result = {"type": "function_call_output", "call_id": m["tool_call_id"]}
            yield result | {"output": m["content"]}
            continue
        if "reasoning_content" in m:
            yield {"type": "reasoning", "summary": [text(m["reasoning_content"], "summary_text")]}
        content = [text(m["content"], "output_text")]
        yield {"type": "message", "role": m["role"], "content": content}
        for call, name, arguments in calls_of(m):
            arguments = json.dumps(arguments, indent=1)
            yield {"type": "function_call", "call_id": call, "name": name, "arguments": arguments}


def openai_messages(messages):
    return json.dumps({"messages": messages})


def hermes(messages):
    logged = [m | {"id": i, "active": 1} for i, m in enumerate(messages)]
    session = {"id": "h", "source": "cli", "system_prompt": None, "message_count": len(messages)}
    return json.dumps(session | {"messages": logged})


def session_traces(messages):
    names = {"reasoning_content": "reasoningContent", "tool_calls": "toolCalls"}
    names["tool_call_id"] = "toolCallId"
    logged = [{names.get(name, name): v for name, v in m.items()} for m in messages]
    head = {"type": "session", "harness": "mine", "id": "s", "name": "Listing"}
    return lines([head, *({"type": "message", "message": m} for m in logged)])


def verifiers(messages):
    logged = [
        m | {"tool_calls": [json.dumps(c) for c in m.get("tool_calls", [])]} for m in messages
    ]
    return json.dumps(
        {"example_id": 0, "prompt": logged[:1], "completion": logged[1:], "reward": 1.0}
    )


def prime_hosted(messages):
    texts = {"prompt": json.dumps(messages[:1]), "completion": json.dumps(messages[1:])}
    return json.dumps({"run_id": "r", "sample_id": 1, "problem_id": 1, "step": 0, **texts})


def mini_swe_agent(messages):
    return document({"trajectory_format": "mini-swe-agent-1", "messages": messages})


def swe_agent(messages, steps=()):
    history = [m | {"agent": "main"} for m in messages]
    return document({"trajectory": [*steps], "history": history, "info": {}})


def recorded_after(messages):
    ends = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    main = [m | {"agent": "main"} for m in messages]
    steps = (
        {"response": messages[i]["content"], "messages": main[:end]}
        for i, end in zip(ends, [*ends[1:], len(main)], strict=True)
    )
    return swe_agent(messages, steps)


def inspect_message(m):
    thought = m.get("reasoning_content")
    parts = [{"type": "reasoning", "reasoning": thought}] if thought else []
    parts += [text(m["content"])] if m["content"] else []
    calls = [{"id": c, "function": n, "arguments": a} for c, n, a in calls_of(m)]
    result = {"tool_call_id": m["tool_call_id"]} if "tool_call_id" in m else {}
    return {"role": m["role"], "content": parts, "tool_calls": calls} | result


def inspect_ai(messages):
    logged = [inspect_message(m) for m in messages]
    events = [
        {"event": "model", "input": logged[:i], "output": {"choices": [{"message": m}]}}
        for i, m in enumerate(logged)
        if m["role"] == "assistant"
    ]
    sample = {"id": 1, "epoch": 1, "messages": logged, "events": events}
    head = {"version": 2, "status": "success", "eval": {"task": "t"}}
    return document(head | {"samples": [sample]})


GEMINI = {"sessionId": "s", "projectHash": "p"}


def gemini_messages(messages):
    results, logged = results_in(messages), []
    for m in messages:
        message = {"id": f"{len(logged)}", "type": "user", "content": m["content"]}
        if m["role"] == "assistant":
            calls = [
                {"id": c, "name": n, "args": a}
                | {"result": [{"functionResponse": {"response": {"output": results[c]}}}]}
                for c, n, a in calls_of(m)
            ]
            thoughts = [{"subject": m["reasoning_content"]}] if "reasoning_content" in m else []
            message |= {"type": "gemini", "toolCalls": calls, "thoughts": thoughts}
        logged += [message] if m["role"] != "tool" else []
    return logged


def gemini_cli(messages):
    return document(GEMINI | {"messages": gemini_messages(messages)})


def gemini_lines(messages):
    """With a message that was taken back, and each one again in a later state."""
    first, *others = gemini_messages(messages)
    head = GEMINI | {"startTime": "t", "kind": "main"}
    begun = [{"$set": {"messages": [first]}}]
    begun += [{"id": "x", "type": "user", "content": "Taken back."}, {"$rewindTo": "x"}]
    states = [(m | {"toolCalls": []}, {"$set": {"lastUpdated": "t"}}, m) for m in others]
    return lines([head, *begun, *(line for state in states for line in state)])


def codex_cli(messages):
    head = {"timestamp": "t", "type": "response_item"}
    return lines(head | {"payload": item} for item in items(messages))


def nemo_gym(messages):
    start = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
    response = {"id": "r", "object": "response", "output": [*items(messages[start:])]}
    row = {"responses_create_params": {"input": [*items(messages[:start])]}, "response": response}
    return json.dumps(row | {"_ng_task_index": 0, "_ng_rollout_index": 0, "reward": 1.0})


def claude_code(messages):
    records = []
    for i, m in enumerate(in_blocks(messages)):
        head = {"type": m["role"], "uuid": f"{i}", "sessionId": "s"}
        records.append(head | {"message": {"id": f"m{i}"} | m})
    return lines(records)


def openhands(messages):
    events = []
    for m in messages:
        if m["role"] == "assistant":
            response = {"id": f"r{len(events)}", "choices": [{"message": with_json(m)}]}
            event = {"source": "agent", "action": "run", "args": {}}
            event["tool_call_metadata"] = {"model_response": response}
        elif m["role"] == "tool":
            event = {"source": "agent", "observation": "run", "content": m["content"]}
            event["tool_call_metadata"] = {"tool_call_id": m["tool_call_id"]}
        else:
            action = {"system": "system"}.get(m["role"], "message")
            event = {"source": "user", "action": action, "args": {"content": m["content"]}}
        events.append({"id": len(events)} | event)
    return document(events)


def rllm(messages):
    ends = [i for i, m in enumerate(messages, 1) if m["role"] == "assistant"]
    tokens = {"prompt_ids": [], "response_ids": [], "logprobs": []}
    steps = [tokens | {"chat_completions": messages[:end]} for end in ends]
    trajectory = {"name": "solver", "reward": 1.0, "steps": steps}
    episode = {"id": "t:0", "task": {"id": "t"}, "termination_reason": "env_done"}
    return document(episode | {"is_correct": True, "trajectories": [trajectory]})


def verifiers_traces(messages):
    nodes = []
    for i, m in enumerate(messages):
        calls = [{"id": c, "name": n, "arguments": json.dumps(a)} for c, n, a in calls_of(m)]
        node = {"message": m | ({"tool_calls": calls} if calls else {})}
        nodes.append(node | {"sampled": m["role"] == "assistant"})
        nodes[-1] |= {"parent": i - 1} if i else {}
    trace = {"agent": {"name": "agent", "trainable": True}, "nodes": nodes, "rewards": {}}
    trace |= {"ok": True, "errors": []}
    task = {"type": "T", "data": {}, "key": "k1"}
    return json.dumps({"id": "e", "task": task, "ok": True, "errors": [], "traces": [trace]})


def trl(messages):
    """TRL's file gives all calls one struct of arguments, so only text is written."""
    chat = [{k: v for k, v in m.items() if k in ("role", "content")} for m in messages]
    table = pa.table({"step": [1], "prompt": [chat[:1]], "completion": [chat[1:]], "score": [1.0]})
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def chats(messages):
    """LangChain's messages."""
    logged = []
    for m in messages:
        kind = {"user": "human", "assistant": "ai"}.get(m["role"], m["role"])
        calls = [{"id": c, "name": n, "args": a} for c, n, a in calls_of(m)]
        message = {"type": kind, "content": m["content"], "tool_calls": calls}
        message |= {"tool_call_id": m["tool_call_id"]} if "tool_call_id" in m else {}
        thought = {"reasoning_content": m.get("reasoning_content")}
        logged.append(message | ({"additional_kwargs": thought} if kind == "ai" else {}))
    return json.dumps({"messages": logged})


def traces(messages):
    spans = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            values = {"input.value": json.dumps(messages[:i]), "output.value": json.dumps(message)}
            attributes = {"openinference.span.kind": "LLM"} | values
            context = {"trace_id": "0xt", "span_id": f"0x{i + 1}"}
            spans.append({"context": context, "start_time": i + 1, "attributes": attributes})
    return lines(spans)


def pi_messages(messages):
    for m in messages:
        parts = [text(m["content"])] if m["content"] else []
        if "reasoning_content" in m:
            parts.insert(0, {"type": "thinking", "thinking": m["reasoning_content"]})
        parts += [
            {"type": "toolCall", "id": c, "name": n, "arguments": a} for c, n, a in calls_of(m)
        ]
        role = m["role"].replace("tool", "toolResult")
        yield {"role": role, "content": parts, "toolCallId": m.get("tool_call_id")}


def pi(messages):
    head = {"type": "session", "id": "s", "version": 3, "timestamp": "t", "cwd": "/"}
    records = [{"type": "message", "message": m} for m in pi_messages(messages)]
    return json.dumps(head) + "\n" + chain(records)


def openclaw(messages):
    event = {"sessionKey": "agent:main:main", "agentId": "main"}
    start = event | {"type": "agent.start", "prompt": "x"}
    end = event | {"type": "agent.end", "success": True, "messages": [*pi_messages(messages)]}
    return lines([start, end])


def qwen_code(messages):
    records = []
    for m in messages:
        thought = m.get("reasoning_content")
        parts = [{"text": thought, "thought": True}] if thought else []
        parts += [{"text": m["content"]}] if m["content"] else []
        calls = [{"id": c, "name": n, "args": a} for c, n, a in calls_of(m)]
        parts += [{"functionCall": call} for call in calls]
        if m["role"] == "tool":
            answer = {"id": m["tool_call_id"], "response": {"output": m["content"]}}
            parts = [{"functionResponse": answer}]
        kind = m["role"].replace("tool", "tool_result")
        message = {"role": "model" if kind == "assistant" else "user", "parts": parts}
        records.append({"type": kind, "sessionId": "s", "message": message})
    return chain(records, "uuid", "parentUuid")


def kimi_cli(messages):
    records = [{"type": "metadata", "protocol_version": "1.4"}]
    for i, m in enumerate(messages):
        content, events = [text(m["content"])], []
        if m["role"] == "system":
            records.append({"type": "config.update", "systemPrompt": m["content"]})
        elif m["role"] == "user":
            message = {"role": "user", "content": content, "toolCalls": []}
            records.append({"type": "context.append_message", "message": message})
        elif m["role"] == "tool":
            result = {"output": m["content"]}
            events = [{"type": "tool.result", "toolCallId": m["tool_call_id"], "result": result}]
        else:
            thought = {"type": "think", "think": m.get("reasoning_content", "")}
            parts = [{"type": "content.part", "part": part} for part in (thought, *content)]
            parts += [
                {"type": "tool.call", "toolCallId": c, "name": n, "args": a}
                for c, n, a in calls_of(m)
            ]
            events = [{"type": "step.begin", "uuid": f"{i}"}]
            events += [part | {"stepUuid": f"{i}"} for part in parts]
        records += [{"type": "context.append_loop_event", "event": e, "time": 1} for e in events]
    return lines(records)


def opencode_tables(messages):
    """Rows of OpenCode's database; `data` is decoded."""
    tables = {"session": [{"id": "s", "parent_id": None, "directory": "/"}]}
    tables |= {"message": [], "part": []}
    results = results_in(messages)
    for i, m in enumerate(messages):
        if m["role"] == "tool":
            continue
        row = {"session_id": "s", "time_created": i, "time_updated": i}
        tables["message"].append({"id": f"m{i}", **row, "data": {"role": m["role"]}})
        parts = [text(m["content"])]
        if "reasoning_content" in m:
            parts.insert(0, text(m["reasoning_content"], "reasoning"))
        for call, name, arguments in calls_of(m):
            state = {"status": "completed", "input": arguments, "output": results[call]}
            parts.append({"type": "tool", "callID": call, "tool": name, "state": state})
        tables["part"] += [
            {"id": f"p{i:03}{j}", "message_id": f"m{i}", **row, "data": part}
            for j, part in enumerate(parts)
        ]
    return tables


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


def database_of(tables, columns_of=None):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "some.db"
        save_opencode(path, tables, columns_of)
        return path.read_bytes()


def opencode(messages):
    return database_of(opencode_tables(messages))


def goose_parts(m):
    if m["role"] == "tool":
        result = {"value": {"content": [text(m["content"])]}}
        return [{"type": "toolResponse", "id": m["tool_call_id"], "toolResult": result}]
    thought = m.get("reasoning_content")
    parts = [{"type": "thinking", "thinking": thought}] if thought else []
    parts += [text(m["content"])] if m["content"] else []
    return parts + [
        {"type": "toolRequest", "id": c, "toolCall": {"value": {"name": n, "arguments": a}}}
        for c, n, a in calls_of(m)
    ]


def goose(messages):
    seen = {"metadata_json": {"userVisible": True, "agentVisible": True}}
    rows = [
        {"id": i, "session_id": "s", "role": m["role"].replace("tool", "user")}
        | {"content_json": goose_parts(m), "created_timestamp": i}
        | seen
        for i, m in enumerate(messages)
    ]
    return database_of(
        {"sessions": [{"id": "s", "working_dir": "/"}], "messages": rows}, GOOSE_TABLES
    )


def cline(messages):
    return json.dumps([m | {"ts": 1} for m in in_blocks(messages)], indent=1)


def openhands_sdk(messages):
    events = []
    for i, m in enumerate(messages):
        parts, thought = [text(m["content"])], {"reasoning_content": m.get("reasoning_content")}
        if m["role"] == "system":
            events.append({"kind": "SystemPromptEvent", "system_prompt": parts[0], "tools": []})
        elif m["role"] == "tool":
            result = {"tool_name": "x", "tool_call_id": m["tool_call_id"]}
            events.append({"kind": "ObservationEvent", "observation": {"content": parts}} | result)
        elif not m.get("tool_calls"):
            message = {"role": m["role"], "content": parts} | thought
            events.append({"kind": "MessageEvent", "llm_message": message})
        for j, (call, name, arguments) in enumerate(calls_of(m)):
            called = {"id": call, "name": name, "arguments": json.dumps(arguments)}
            action = {"kind": "ActionEvent", "tool_call": called, "llm_response_id": f"r{i}"}
            events.append(action | ({"thought": []} if j else {"thought": parts} | thought))
    place = {"source": "agent", "timestamp": "t"}
    return lines({"id": f"{i}", **place, **e} for i, e in enumerate(events))


def openhands_llm(messages):
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    speaking = [i for i in answers if any(map(messages[i].get, SAYS))]
    end, sent = max(speaking or answers), [with_json(m) for m in messages]
    record = {"messages": sent[:end], "response": {"choices": [{"message": sent[end]}]}}
    return document(record | {"timestamp": 1.5, "latency_sec": 1})


def copilot_cli(messages):
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
                {"toolCallId": c, "type": "function", "name": n, "arguments": a}
                for c, n, a in calls_of(m)
            ]
        records.append({"type": kind, "data": data})
    return chain(records)


def droid(messages):
    head = {"type": "session_start", "id": "s", "cwd": "/"}
    records = [{"type": "message", "message": m} for m in in_blocks(messages)]
    return json.dumps(head) + "\n" + chain(records)


def cursor(messages):
    return lines(
        {"role": m["role"], "message": {"content": m["content"]}} for m in in_blocks(messages)
    )


def grok_cli(messages):
    records = []
    for m in messages:
        if m.get("reasoning_content"):
            summary = [text(m["reasoning_content"], "summary_text")]
            records.append({"type": "reasoning", "id": "r", "summary": summary})
        record = {"type": m["role"], "content": m["content"]}
        if m["role"] == "tool":
            record |= {"type": "tool_result", "tool_call_id": m["tool_call_id"]}
        if m["role"] == "assistant":
            calls = [{"id": c, "name": n, "arguments": json.dumps(a)} for c, n, a in calls_of(m)]
            record |= {"tool_calls": calls, "model_id": "g"}
        records.append(record)
    return lines(records)


WRITERS = {
    "chats": (chats, "a.jsonl"),
    "claude_code": (claude_code, "a.jsonl"),
    "cline": (cline, "api_conversation_history.json"),
    "codex_cli": (codex_cli, "a.jsonl"),
    "copilot_cli": (copilot_cli, "a.jsonl"),
    "cursor": (cursor, "a.jsonl"),
    "droid": (droid, "a.jsonl"),
    "gemini_cli": (gemini_cli, "a.json"),
    "gemini_cli, lines": (gemini_lines, "a.jsonl"),
    "goose": (goose, "sessions.db"),
    "grok_cli": (grok_cli, "a.jsonl"),
    "hermes": (hermes, "a.jsonl"),
    "inspect_ai": (inspect_ai, "a.json"),
    "kimi_cli": (kimi_cli, "a.jsonl"),
    "mini_swe_agent": (mini_swe_agent, "a.traj.json"),
    "openai_messages": (openai_messages, "a.jsonl"),
    "openclaw": (openclaw, "a.jsonl"),
    "opencode": (opencode, "opencode.db"),
    "openhands": (openhands, "a.events.json"),
    "openhands_llm": (openhands_llm, "a.json"),
    "openhands_sdk": (openhands_sdk, "a.jsonl"),
    "pi": (pi, "a.jsonl"),
    "prime_hosted": (prime_hosted, "a.jsonl"),
    "qwen_code": (qwen_code, "a.jsonl"),
    "session_traces": (session_traces, "a.jsonl"),
    "swe_agent": (swe_agent, "a.traj"),
    "swe_agent, recorded after": (recorded_after, "a.traj"),
    "traces": (traces, "a.jsonl"),
    "verifiers": (verifiers, "results.jsonl"),
}
"""Logs of one conversation as files of text formats: who writes them, and their names."""

EXACT_FORMATS = {
    "nemo_gym": (nemo_gym, "a.jsonl"),
    "rllm": (rllm, "episode_0.json"),
    "trl": (trl, "completions_00001.parquet"),
    "verifiers, traces": (verifiers_traces, "traces.jsonl"),
}
"""The same for formats that hold ids too, here without them."""

SYSTEM_IS_USER = ("claude_code", "cursor", "droid", "gemini_cli", "gemini_cli, lines")
SYSTEM_IS_USER += ("qwen_code",)


NO_SYSTEM = ("cline",)
TEXT_ALONE = ("trl",)
ANSWERS_JOIN = ("codex_cli", "goose", "nemo_gym")
NEVER_EMPTY = ("goose",)
NOTHING_UNSENT = (
    "claude_code",
    "cline",
    "codex_cli",
    "copilot_cli",
    "cursor",
    "droid",
    "gemini_cli",
)
NOTHING_UNSENT += ("gemini_cli, lines", "grok_cli", "hermes", "kimi_cli", "openclaw", "opencode")
NOTHING_UNSENT += ("openhands_sdk", "pi", "qwen_code", "session_traces")
SAYS = ("content", "tool_calls", "reasoning_content")


def as_logged(name, messages):
    """The messages as a format has them: none empty, a system's as a user's or left out, calls too."""
    if name in NO_SYSTEM:
        messages = [m for m in messages if m["role"] != "system"]
    if name in SYSTEM_IS_USER:
        messages = [m | {"role": m["role"].replace("system", "user")} for m in messages]
    if name in TEXT_ALONE:
        texts = [m for m in messages if m["role"] != "tool"]
        messages = [{"role": m["role"], "content": m["content"], "tool_calls": []} for m in texts]
    if name in NEVER_EMPTY:
        messages = [m if any(map(m.get, SAYS)) else m | {"content": "x"} for m in messages]
    return messages


def log_of(name, messages):
    """The bytes of a log, and the name of its file."""
    write, file = (WRITERS | EXACT_FORMATS)[name]
    content = write(as_logged(name, messages))
    return content if isinstance(content, bytes) else content.encode(), file


def facts_in(name, messages):
    """What must be read of a log."""
    logged = as_logged(name, messages)
    if name in NOTHING_UNSENT:  # an answer that says nothing is not sent again
        logged = [m for m in logged if m["role"] != "assistant" or any(map(m.get, SAYS))]
    return facts_of(joined(logged) if name in ANSWERS_JOIN else logged)
