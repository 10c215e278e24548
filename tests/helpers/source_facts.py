"""What a logged run says, read by plain json code: the facts that its tokens must hold, in order."""

import json
import re
import unicodedata

from tests.helpers.session_facts import SESSIONS

ROLES = {
    "system": r"<\|im_start\|>system",
    "user": r"<\|im_start\|>user",
    "assistant": r"<\|im_start\|>assistant",
    "tool": r"<tool_response>|<\|im_start\|>tool",
}


def facts_of(messages):
    """Roles, texts, reasoning, names and arguments of OpenAI-style messages, to the last answer."""
    found, end = [], 0
    for message in messages:
        role = message["role"]
        thought = next(
            (message[k] for k in ("reasoning_content", "reasoning") if message.get(k)), ""
        )
        said = [*texts_in(thought), *texts_in(message.get("content"))]
        for call in message.get("tool_calls") or []:
            call = json.loads(call) if isinstance(call, str) else call
            function = call.get("function")
            function = (
                function
                if isinstance(function, dict)
                else {**call, "name": function or call["name"]}
            )
            arguments = function.get("arguments") or {}
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            said += [function["name"], *leaves(arguments)]
        found += [("role", role), *(("text", text) for text in said)]
        end = len(found) if role == "assistant" and said else end
    return found[:end]


def texts_in(content):
    if content is None or isinstance(content, str):
        return [content] if content else []
    parts = (
        part if isinstance(part, str) else part.get("text") or part.get("reasoning")
        for part in content
    )
    return [part for part in parts if part]


def leaves(value):
    """Keys and scalars of a JSON value, in order."""
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in (key, *leaves(inner))]
    if isinstance(value, list):
        return [leaf for inner in value for leaf in leaves(inner)]
    return [value if isinstance(value, str) else json.dumps(value)]


def missing_fact(facts, text):
    """The first fact that a text does not hold after the ones before it; None: it holds all."""
    text, at = normal(text), 0
    for kind, value in facts:
        if kind == "role":
            pattern = ROLES[value]
        else:
            plain = normal(value).strip()
            quoted = json.dumps(plain, ensure_ascii=False)[1:-1]
            pattern = "|".join({re.escape(plain), re.escape(quoted)})
        match = re.compile(pattern).search(text, at)
        if match is None:
            return kind, value
        at = match.end()
    return None


def spelled(messages):
    """Roles, reasoning, contents, names and arguments of messages as they are read, in order."""
    return "\n".join(piece for message in messages for piece in _pieces(message))


def _pieces(message):
    yield "<|im_start|>" + message["role"]
    yield message.get("reasoning_content", "")
    yield message["content"] or ""
    for call in message.get("tool_calls", ()):
        yield call["function"]["name"]
        yield call["function"]["arguments"]


def normal(text):
    """As tokenizers normalise it."""
    return unicodedata.normalize("NFC", text)


def read_source(name, path):
    """The facts of each run of a log, by its trajectory's `source` or the start of it."""
    return dict(READERS[name](path, f"{path}"))


def _lines(path):
    return [
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()
    ]


def _mini_swe_agent(path, name):
    document = json.loads(path.read_text(encoding="utf-8"))
    messages = document if isinstance(document, list) else document["messages"]
    yield name, facts_of([m for m in messages if m.get("role") != "exit"])


def _swe_agent(path, name):
    yield name, facts_of(json.loads(path.read_text(encoding="utf-8"))["history"])


def _verifiers(path, name):
    for number, row in enumerate(_lines(path), 1):
        yield f"{name}:{number}", facts_of([*row["prompt"], *row["completion"]])


def _prime_hosted(path, name):
    document = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        rows = {f"{name}:{n}": row for n, row in enumerate(_lines(path), 1)}
    else:
        samples = json.loads(document)["samples"]
        rows = {f"{name}, samples[{n}]": row for n, row in enumerate(samples)}
    for place, row in rows.items():
        yield place, facts_of([*json.loads(row["prompt"]), *json.loads(row["completion"])])


def _inspect_ai(path, name):
    for index, sample in enumerate(json.loads(path.read_text(encoding="utf-8"))["samples"]):
        held, messages = sample.get("attachments") or {}, []
        for message in sample["messages"]:
            content = message["content"]
            if isinstance(content, str) and content.startswith("attachment://"):
                content = held[content.removeprefix("attachment://")]
            failure = message.get("error") if message["role"] == "tool" else None
            messages.append({**message, "content": failure["message"] if failure else content})
        yield f"{name}, samples[{index}]", facts_of(messages)


def _codex_cli(path, name):
    items = [line["payload"] for line in _lines(path) if line["type"] == "response_item"]
    yield name, facts_of(_chat(items))


def _nemo_gym(path, name):
    """The runs without ids that have their input."""
    if path.suffix == ".json":
        return
    for number, row in enumerate(_lines(path), 1):
        sent, output = row["responses_create_params"], row["response"]["output"]
        if any(item.get("generation_token_ids") for item in output):
            continue
        given = sent["input"]
        given = [{"role": "user", "content": given}] if isinstance(given, str) else given
        told = [{"role": "system", "content": text} for text in [sent.get("instructions")] if text]
        yield f"{name}:{number}", facts_of([*told, *_chat(given), *_chat(output)])


def _chat(items):
    """The messages of Responses items."""
    messages = []
    for item in items:
        if item.get("type", "message") == "message":
            role = item["role"].replace("developer", "system")
            messages.append({"role": role, "content": item["content"]})
        elif item["type"] == "reasoning":
            parts = item.get("content") or item.get("summary")
            messages.append({"role": "assistant", "content": parts})
        elif item["type"] == "function_call":
            messages.append({"role": "assistant", "tool_calls": [item | {"function": None}]})
        elif item["type"] == "function_call_output":
            messages.append({"role": "tool", "content": item["output"]})
    return joined(messages)


def joined(messages):
    """Without the roles of pieces that are one answer: they have one header together."""
    made = []
    for message in messages:
        last = made[-1] if made else None
        if last and message["role"] == last["role"] == "assistant":
            last["content"] = [*_as_list(last.get("content")), *_as_list(message.get("content"))]
            last["tool_calls"] = [
                *(last.get("tool_calls") or []),
                *(message.get("tool_calls") or []),
            ]
        else:
            made.append(dict(message))
    return made


def _as_list(content):
    return [content] if isinstance(content, str) else list(content or [])


def _claude_code(path, name):
    document = path.read_text(encoding="utf-8")
    lines = json.loads(document)["loglines"] if path.suffix == ".json" else _lines(path)
    messages = []
    spoken = [line for line in lines if isinstance(line, dict)]
    for line in [line for line in spoken if isinstance(line.get("message"), dict)]:
        content = line["message"].get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for block in [block for block in blocks or () if isinstance(block, dict)]:
            if block["type"] == "tool_result":
                messages.append({"role": "tool", "content": block["content"]})
            elif block["type"] == "tool_use":
                call = {"name": block["name"], "arguments": block["input"]}
                messages.append({"role": "assistant", "tool_calls": [call]})
            else:
                text = block.get("text") or block.get("thinking")
                messages.append({"role": line["type"], "content": text})
    yield name, facts_of(joined(messages))


def _openhands(path, name):
    if path.suffix == ".jsonl":
        rows = {f"{name}:{n}": row["history"] for n, row in enumerate(_lines(path), 1)}
    else:
        rows = {name: json.loads(path.read_text(encoding="utf-8"))}
    for place, history in rows.items():
        events = [e for item in history for e in (item if isinstance(item, list) else [item])]
        yield place, facts_of(_events(events))


def _events(events):
    seen = set()
    for event in events:
        called = event.get("tool_call_metadata") or {}
        response, args = called.get("model_response") or {}, event.get("args") or event
        action = event.get("action")
        if event.get("observation"):
            if event["observation"] not in {"recall", "agent_state_changed", "null"}:
                yield {"role": "tool" if called else "user", "content": event.get("content")}
        elif action == "system" or (action == "message" and event.get("source") != "agent"):
            yield {
                "role": "system" if action == "system" else "user",
                "content": args.get("content"),
            }
        elif response:
            if response["id"] not in seen:
                yield response["choices"][0]["message"]
            seen.add(response["id"])
        elif action in {"run", "message", "finish"}:
            parts = [args.get(k) for k in ("thought", "command", "content", "final_thought")]
            yield {"role": "assistant", "content": [part for part in parts if part]}


def _session(read):
    return lambda path, name: [(name, facts_of(read(path)))]


READERS = {
    **{name: _session(read) for name, read in SESSIONS.items()},
    "claude_code": _claude_code,
    "codex_cli": _codex_cli,
    "inspect_ai": _inspect_ai,
    "mini_swe_agent": _mini_swe_agent,
    "nemo_gym": _nemo_gym,
    "openhands": _openhands,
    "prime_hosted": _prime_hosted,
    "swe_agent": _swe_agent,
    "verifiers": _verifiers,
}
