"""What sessions of coding agents say, read by plain json code; see `source_facts`."""

import json
from itertools import groupby


def lines_in(path):
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def records_in(path):
    """The lines of a file, or its document."""
    try:
        return lines_in(path)
    except ValueError:
        return [json.loads(path.read_text(encoding="utf-8"))]


def gemini_cli(path):
    """The last state of a session's messages."""
    state = {}
    for number, record in enumerate(records_in(path)):
        replaced = record.get("messages", record.get("$set", {}).get("messages"))
        if replaced is not None:
            state = {m.get("id", (number, i)): m for i, m in enumerate(replaced)}
        elif "$rewindTo" in record:
            keys = list(state)
            for key in keys[keys.index(record["$rewindTo"]) :]:
                del state[key]
        elif "type" in record:
            state[record.get("id", number)] = record
    for message in state.values():
        content = message.get("content", message.get("parts"))
        parts = [{"text": content}] if isinstance(content, str) else content or []
        if message["type"] == "user":
            results = [p["functionResponse"] for p in parts if "functionResponse" in p]
            said = [p["text"] for p in parts if "text" in p]
            if said:
                yield {"role": "user", "content": said}
            if not any("toolCalls" in m for m in state.values()):
                yield from (_gemini_result(result) for result in results)
        if message["type"] not in {"gemini", "model"}:
            continue
        thoughts = message.get("thoughts") or []
        calls = message.get("toolCalls") or []
        yield {
            "role": "assistant",
            "reasoning": [t[k] for t in thoughts for k in ("subject", "description") if t.get(k)],
            "content": [p["text"] for p in parts if p.get("text")],
            "tool_calls": [{"name": c["name"], "arguments": c.get("args")} for c in calls],
        }
        for part in [p for call in calls for p in call.get("result") or []]:
            yield _gemini_result(part["functionResponse"])


def _gemini_result(found):
    answer = found["response"]
    return {"role": "tool", "content": answer.get("output") or answer.get("error")}


def pi(path):
    """The messages of a session with one branch: each context, one after the other."""
    kept, records = [], lines_in(path)
    spoken = [r.get("message", {}).get("role") == "assistant" for r in records]
    for record in records[: len(spoken) - spoken[::-1].index(True)]:
        if record["type"] == "compaction":
            yield from (said for _, said in kept if said)
            ids = [key for key, _ in kept]
            first = record["firstKeptEntryId"]
            before = kept[ids.index(first) :] if first in ids else []
            kept = [("", {"role": "user", "content": record["summary"]}), *before]
        said = pi_message(record["message"]) if record["type"] == "message" else None
        kept.append((record.get("id"), said))
    yield from (said for _, said in kept if said)


def pi_message(message):
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {
        "role": message["role"].replace("toolResult", "tool"),
        "reasoning": [b["thinking"] for b in blocks if b["type"] == "thinking"],
        "content": [b["text"] for b in blocks if b.get("text", "").strip()],
        "tool_calls": [b for b in blocks if b["type"] == "toolCall"],
    }


def openclaw(path):
    """The messages of the last end of each agent, the main one first."""
    ends = {r["sessionKey"]: r["messages"] for r in lines_in(path) if r["type"] == "agent.end"}
    for key in sorted(ends, key=lambda key: "subagent" in key):
        yield from map(pi_message, ends[key])


def qwen_code(path):
    """The paths to the last answers of the branches, in the order of the file."""
    records = {}
    for record in lines_in(path):
        parts = record.get("message", {}).get("parts", [])
        before = records.get(record["uuid"])
        records[record["uuid"]] = record | {"parts": (before["parts"] if before else []) + parts}
    parents = {record["parentUuid"] for record in records.values()}
    for leaf in records.values():
        found, record = [], leaf if leaf["uuid"] not in parents else None
        while record is not None:
            found.insert(0, record)
            record = records.get(record["parentUuid"])
        spoken = [each for each in found if each["type"] != "system"]
        if any(each["type"] == "assistant" for each in spoken):
            yield from (said for each in spoken for said in _qwen_message(each))


def _qwen_message(record):
    if record["type"] == "tool_result":
        for part in record["parts"]:
            yield _gemini_result(part["functionResponse"])
        return
    said = {"role": record["type"], "content": [], "tool_calls": []}
    for part in record["parts"]:
        if "functionCall" in part:
            call = part["functionCall"]
            said["tool_calls"].append({**call, "arguments": call.get("args")})
            continue
        if said["tool_calls"]:
            yield said
            said = {"role": record["type"], "content": [], "tool_calls": []}
        said["content"].append(part["text"])
    yield said


def kimi_cli(path):
    """Wire events: answers by step, in order of their begin."""
    messages, steps = [], {}
    for record in lines_in(path):
        if record.get("systemPrompt") and not messages:
            messages.append({"role": "system", "content": record["systemPrompt"]})
        if record["type"] == "context.append_message":
            messages.append(record["message"])
        event = record.get("event", {})
        step = steps.get(event.get("stepUuid"))
        if event.get("type") == "step.begin":
            steps[event["uuid"]] = {"role": "assistant", "content": [], "tool_calls": []}
            messages.append(steps[event["uuid"]] | {"step": event["uuid"]})
        elif event.get("type") == "content.part":
            name = "text" if "text" in event["part"] else "think"
            step["content"].append(event["part"][name])
        elif event.get("type") == "tool.call":
            step["tool_calls"].append({"name": event["name"], "arguments": event["args"]})
        elif event.get("type") == "tool.result":
            messages.append({"role": "tool", "content": event["result"]["output"]})
    sent = [m for m in messages if m.get("step") is None or m["content"] or m["tool_calls"]]
    for is_typed, row in groupby(sent, lambda m: m.get("origin") == {"kind": "user"}):
        if is_typed:  # prompts in a row are one message
            yield {"role": "user", "content": [part for m in row for part in m["content"]]}
        else:
            yield from row


def opencode(path):
    """The messages of all sessions of a storage directory, by the time of their creation."""
    for session in sorted(path.glob("session/*/*.json")):
        name = json.loads(session.read_text())["id"]
        found = [
            json.loads(f.read_text()) for f in sorted((path / "message" / name).glob("*.json"))
        ]
        for message in sorted(found, key=lambda each: each["time"]["created"]):
            files = sorted((path / "part" / message["id"]).glob("*.json"))
            yield name, message["role"], [json.loads(file.read_text()) for file in files]


def openhands_sdk(path):
    """The actions, results and messages of a conversation, one after the other."""
    for event in lines_in(path):
        if event["kind"] == "SystemPromptEvent":
            yield {"role": "system", "content": [event["system_prompt"]]}
        elif event["kind"] == "MessageEvent":
            yield event["llm_message"]
        elif event["kind"] == "ActionEvent":
            said = {"role": "assistant", "reasoning": event["reasoning_content"]}
            yield said | {"content": event["thought"], "tool_calls": [event["tool_call"]]}
        elif event["kind"] == "ObservationEvent":
            yield {"role": "tool", "content": event["observation"]["content"]}


SESSIONS = {
    "gemini_cli": gemini_cli,
    "kimi_cli": kimi_cli,
    "openclaw": openclaw,
    "openhands_sdk": openhands_sdk,
    "pi": pi,
    "qwen_code": qwen_code,
}
