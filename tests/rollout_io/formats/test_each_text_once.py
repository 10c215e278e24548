"""Every text that the model saw is in its context: in order, and once.

Logs are read a second time by plain JSON code that shares nothing with the adapters.
"""

import json
from itertools import groupby

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_io.conversion.text import with_answers
from rollout_io.formats.base import Conversation
from rollout_io.formats.detect import load_formats
from schemas.errors import RolloutError
from tests.helpers.examples import examples
from tests.helpers.text_log_helpers import read_all

ADAPTERS = load_formats().adapters


def contexts(format_name, path):
    """The texts of each context up to its last answer, of each run of a log."""
    found = []
    for run in read_all(ADAPTERS[format_name], path):
        if isinstance(run, RolloutError):
            found.append(None)
            continue
        try:
            cut = [step for step in with_answers(run) if isinstance(step, Conversation)]
        except RolloutError:  # every answer of the run is empty
            found.append(None)
            continue
        found.append(
            [[(list(texts_of(m)), m["role"] == "assistant") for m in step.messages] for step in cut]
        )
    return found


def lines_of(pieces):
    """The lines of texts, in order; those of one answer, whose pieces may be in any order, sorted."""
    lines = []
    for is_answer, group in groupby(pieces, lambda piece: piece[1]):
        told = [line for texts, _ in group for text in texts for line in text.split("\n")]
        lines += sorted(told) if is_answer else told
    return lines


def texts_of(message):
    """Reasoning, text, names and arguments of a message."""
    yield from plain(message.get("reasoning_content") or message.get("reasoning"))
    yield from plain(message.get("content"))
    for call in message.get("tool_calls") or ():
        yield call["function"]["name"]
        yield canonical(call["function"]["arguments"])


def plain(content):
    if isinstance(content, str):
        return [content] if content else []
    texts = [part if isinstance(part, str) else part.get("text") for part in content or ()]
    return ["\n".join(text for text in texts if text)] if any(texts) else []


def canonical(arguments):
    value = json.loads(arguments) if isinstance(arguments, str) else arguments
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def json_lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def item_texts(item):
    """The texts of an item of OpenAI's Responses API, and whether the model wrote it."""
    kind = item["type"]
    if kind == "message":
        return plain(item["content"]), item["role"] == "assistant"
    if kind == "reasoning":
        return plain(item["summary"]), True
    if kind == "agent_message":
        return plain(item["content"]), False
    if kind == "tool_search_output":
        return [canonical(item["tools"])], False
    if kind == "custom_tool_call":
        return [item["name"], canonical({"input": item["input"]})], True
    assert kind == "function_call_output"
    return plain(item["output"]), False


def to_last_answer(pieces):
    """Texts in order up to the last one of the model."""
    pieces = [(texts, is_answer) for texts, is_answer in pieces if texts]
    last = max((i for i, (_, is_answer) in enumerate(pieces) if is_answer), default=-1)
    return pieces[: last + 1]


def codex_texts(path):
    return to_last_answer(item_texts(record["payload"]) for record in json_lines(path))


TEXT = st.sampled_from(["a", "b c", "d\ne", "a <|im_end|>", "f \ufffd"])
ITEM = st.one_of(
    st.builds(lambda t, r: {"type": "message", "role": r, "content": t}, TEXT, st.just("user")),
    st.builds(lambda t: {"type": "message", "role": "assistant", "content": t}, TEXT),
    st.builds(
        lambda t: {"type": "reasoning", "summary": [{"type": "summary_text", "text": t}]}, TEXT
    ),
    st.builds(lambda t: {"type": "custom_tool_call", "name": "f", "call_id": t, "input": t}, TEXT),
    st.builds(lambda t: {"type": "function_call_output", "call_id": t, "output": t}, TEXT),
    st.builds(lambda t: {"type": "tool_search_output", "call_id": t, "tools": [{"name": t}]}, TEXT),
    st.builds(
        lambda t: {"type": "agent_message", "content": [{"type": "input_text", "text": t}]}, TEXT
    ),
)
MARKS = st.sampled_from(["replace", "append", "truncate"])
STEP = st.one_of(
    st.builds(lambda t: {"source": "user", "message": t}, TEXT),
    st.builds(lambda t: {"source": "agent", "message": t, "llm_call_count": 1}, TEXT),
    st.builds(
        lambda t, kind: {
            "source": "system",
            "message": "compacted",
            "observation": {"results": [{"content": t}]},
            "extra": {"context_management": {"type": "compaction", "boundary": kind}},
        },
        TEXT,
        MARKS,
    ),
)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(ITEM, max_size=8))
def test_any_items_of_codex_are_one_context(tmp_path_factory, items):
    items = [{"type": "message", "role": "user", "content": "go"}, *items]
    lines = [{"timestamp": "t", "type": "response_item", "payload": item} for item in items]
    path = tmp_path_factory.mktemp("codex") / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    (found,) = contexts("codex_cli", path)
    if any(item_texts(item)[1] for item in items):
        (found,) = found
        assert lines_of(found) == lines_of(codex_texts(path))
    else:
        assert found is None


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(STEP, max_size=9))
def test_any_boundaries_of_atif_leave_what_the_model_saw(tmp_path_factory, steps):
    steps = [{"source": "user", "message": "go"}, *steps]
    numbered = [{"step_id": i, **step} for i, step in enumerate(steps, 1)]
    document = {"schema_version": "ATIF-v1.7", "agent": {"name": "a"}, "session_id": "s"}
    path = tmp_path_factory.mktemp("atif") / "trajectory.json"
    path.write_text(json.dumps(document | {"steps": numbered}), encoding="utf-8")
    expected, context, is_known = [], [], True
    for step in steps:
        kind = step.get("extra", {}).get("context_management", {}).get("boundary")
        if kind == "replace":
            context, is_known = [], True
        is_known = is_known and kind != "truncate"
        told = step["observation"]["results"][0]["content"] if kind else step["message"]
        context = [*context, told]
        if step["source"] == "agent" and is_known:
            expected.append(context)
    (found,) = contexts("harbor", path)
    seen = [tuple(text for texts, _ in context for text in texts) for context in found or []]
    calls = {tuple(context) for context in expected}
    assert all(context in calls for context in seen)  # each context is what a call saw and said
    assert {call[:n] for call in seen for n in range(len(call) + 1)} >= calls
