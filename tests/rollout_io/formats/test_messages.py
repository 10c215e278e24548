import json

import msgspec
import pytest
from hypothesis import given, settings

from rollout_io.formats.parsing.content import canonical_json
from rollout_io.formats.parsing.messages import prompt_key, read_message, read_messages
from schemas.errors import RolloutError
from tests.helpers.examples import examples
from tests.helpers.text_log_helpers import mutated


def made(*messages):
    return read_messages([msgspec.Raw(json.dumps(m).encode()) for m in messages], "a:1")


def said(content, **fields):
    return {"role": "assistant", "content": content, **fields}


def call(name, arguments, call_id=None):
    identity = {"id": call_id} if call_id else {}
    function = {"name": name, "arguments": arguments}
    return {**identity, "type": "function", "function": function}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        *(("x", "x"), (None, ""), ([], ""), (["a", "b"], "a\nb")),
        ([{"type": "text", "text": "a"}, {"type": "output_text", "text": "b"}], "a\nb"),
        ([{"type": "image_url"}, "a"], [{"type": "image_url"}, {"type": "text", "text": "a"}]),
    ],
)
def test_content_is_text_or_parts_where_one_is_no_text(content, text):
    assert made(said(content)) == [said(text)]


@pytest.mark.parametrize(
    "fields",
    [
        *({name: "why"} for name in ("reasoning_content", "reasoning", "thinking")),
        {"thinking_blocks": [{"type": "thinking", "thinking": "why", "signature": "x"}]},
        {"content": [{"type": "thinking", "thinking": "why"}, {"type": "text", "text": "x"}]},
        {"content": [{"type": "reasoning", "reasoning": "why"}, {"type": "text", "text": "x"}]},
        {
            "content": [
                {"type": "redacted_thinking", "data": "?"},
                {"type": "thinking", "thinking": "why"},
                "x",
            ]
        },
    ],
)
def test_reasoning_under_any_name_is_reasoning_content(fields):
    assert made({"role": "assistant", "content": "x"} | fields) == [
        said("x", reasoning_content="why")
    ]


@pytest.mark.parametrize(
    "logged",
    [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"n": 1.0}'}},
        {"id": "c", "function": {"name": "f", "arguments": {"n": 1.0}}},
        {"id": "c", "function": "f", "arguments": {"n": 1.0}},
        {"id": "c", "name": "f", "arguments": '{"n": 1.0}'},
        '{"id": "c", "name": "f", "arguments": {"n": 1.0}}',
    ],
)
def test_calls_of_tools_are_openais_and_their_arguments_canonical(logged):
    expected = said("", tool_calls=[call("f", '{"n":1.0}', "c")])
    assert made(said(None, tool_calls=[logged])) == [expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{ "b" : [ 1.10, 1e400 ],\n "a": "\\u00e9" }', '{"b":[1.10,1E+400],"a":"\u00e9"}'),
        (f'{{"n": {"9" * 40}}}', f'{{"n":{"9" * 40}}}'),
        *((text, text) for text in ("", "ls -l", "{'a': 1}", '{"a": NaN}', "[" * 100_000)),
    ],
)
def test_canonical_json_keeps_order_and_digits_and_what_is_no_json(text, expected):
    assert canonical_json(text) == expected


@pytest.mark.parametrize(
    ("message", "rule"),
    [
        *((message, "record_type") for message in ("x", [], None, {"content": "x"}, {"role": 1})),
        (said("", tool_calls=[{"id": "c"}]), "message"),
        (said("", tool_calls=["{"]), "json_line"),
        (said("", tool_calls="f"), "record_type"),
        (said({"a": 1}), "record_type"),
        ({"object": "response", "output": [{"type": "mcp_call"}]}, "message"),
    ],
)
def test_what_is_no_message_is_refused_by_name(message, rule):
    with pytest.raises(RolloutError) as caught:
        made(message)
    assert (caught.value.rule, caught.value.where.startswith("a:1[0]")) == (rule, True)


def test_one_message_that_would_be_several_is_refused():
    results = [{"type": "tool_result", "tool_use_id": c, "content": "x"} for c in "cd"]
    raw = msgspec.Raw(json.dumps({"role": "user", "content": results}).encode())
    with pytest.raises(RolloutError, match="message"):
        read_message(raw, "a:1")


def test_prompts_have_one_name_if_what_stands_before_the_first_answer_is_equal():
    user = {"role": "user", "content": "x"}
    assert (
        prompt_key([user, said("a")]) == prompt_key([user, said("b"), user]) == prompt_key([user])
    )
    assert prompt_key([user]) != prompt_key([user, user])
    assert prompt_key("x") == prompt_key("x") != prompt_key("y")


MESSAGES = [
    said([{"type": "thinking", "thinking": "why"}, {"type": "tool_use", "name": "f", "input": {}}]),
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": ["x"]}]},
    said(None, tool_calls=[{"id": "c", "function": {"name": "f", "arguments": "{}"}}], name="a"),
    {"object": "response", "output": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
    {"type": "function_call_output", "call_id": "c", "output": {"content": [{"text": "x"}]}},
]


@given(mutated(json.dumps(MESSAGES).encode()))
@settings(deadline=None, max_examples=examples(200))
def test_damaged_messages_are_messages_or_refused_by_name(document):
    try:
        raws = msgspec.json.decode(document, type=list[msgspec.Raw])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return
    try:
        found = read_messages(raws, "a:1")
    except RolloutError:
        return
    assert len(found) >= len(raws)
    for message in found:
        assert isinstance(message["role"], str)
        assert isinstance(message["content"], str | list)
