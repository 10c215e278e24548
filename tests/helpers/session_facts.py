"""What sessions of coding agents say, read by plain json code; see `source_facts`."""

import json


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


SESSIONS = {"gemini_cli": gemini_cli}
