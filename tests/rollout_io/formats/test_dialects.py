"""The converters of the APIs' messages, on requests and responses of our own."""

import json

import pytest

from rollout_io.formats.base import noted
from rollout_io.formats.dialects import anthropic, gemini, responses
from rollout_io.formats.parsing.media import media_part
from schemas.messages import marked, media_in

PNG = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
IMAGE = {"type": "image", "source": PNG}


def call(call_id, name, arguments="{}"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def said(**fields):
    return {"role": "assistant", "content": ""} | fields


def test_anthropics_blocks_become_messages_in_their_order():
    blocks = [
        {"type": "thinking", "thinking": "Look.", "signature": "x"},
        {"type": "redacted_thinking", "data": "y"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "a", "name": "ls", "input": {"n": 1.0}},
        {"type": "thinking", "thinking": "Again."},
        {"type": "tool_use", "id": "b", "name": "ls", "input": {}},
    ]
    results = [
        {"type": "text", "text": "Go on."},
        {
            "type": "tool_result",
            "tool_use_id": "a",
            "content": [{"type": "text", "text": "x"}, IMAGE],
        },
        {"type": "tool_result", "tool_use_id": "b", "content": "y", "is_error": True},
    ]
    given = [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    assert anthropic.messages(given, "a") == [
        said(
            content="I look.", reasoning_content="Look.", tool_calls=[call("a", "ls", '{"n":1.0}')]
        ),
        said(reasoning_content="Again.", tool_calls=[call("b", "ls")]),
        {"role": "tool", "content": [{"type": "text", "text": "x"}, IMAGE], "tool_call_id": "a"},
        {"role": "tool", "content": "y", "tool_call_id": "b", "is_error": True},
        {"role": "user", "content": "Go on."},
    ]


def test_a_tool_of_anthropics_server_is_a_call_with_a_result_inside_the_answer():
    results = [{"type": "web_search_result", "url": "u", "title": "T", "encrypted_content": "zz"}]
    blocks = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": results},
        {"type": "text", "text": "Found."},
    ]
    first, result, last = anthropic.messages([{"role": "assistant", "content": blocks}], "a")
    assert first["tool_calls"] == [call("s", "web_search", '{"query":"q"}')]
    assert result["role"] == "tool"
    assert "T" in result["content"]
    assert "zz" not in result["content"]
    assert last == said(content="Found.")


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "tool_reference", "tool_name": "Fetch"}, "Loaded tool: Fetch"),
        ({"type": "document", "source": {"type": "text", "data": "A text."}}, "A text."),
        (
            {
                "type": "search_result",
                "title": "T",
                "source": "u",
                "content": [{"text": "A text."}],
            },
            "T\nu\nA text.",
        ),
    ],
)
def test_blocks_that_hold_text_are_text(block, text):
    given = [{"role": "user", "content": [block]}]
    assert anthropic.messages(given, "a") == [{"role": "user", "content": text}]


def test_items_of_responses_become_messages_in_their_order():
    given = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go."}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Look."}]},
        {"type": "function_call", "call_id": "a", "name": "ls", "arguments": "{ }"},
        {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": "*** x"},
        {"type": "function_call_output", "call_id": "a", "output": "x"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": [{"text": "y"}, IMAGE]},
        {"type": "mcp_call", "id": "m", "name": "find", "arguments": "{}", "output": "z"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Done."}],
        },
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "More."}]},
        {"role": "developer", "content": "Stop."},
    ]
    assert responses.messages(given, "a") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Go."},
        said(
            reasoning_content="Look.",
            tool_calls=[call("a", "ls"), call("b", "patch", '{"input":"*** x"}')],
        ),
        {"role": "tool", "content": "x", "tool_call_id": "a"},
        {"role": "tool", "content": [{"type": "text", "text": "y"}, IMAGE], "tool_call_id": "b"},
        said(tool_calls=[call("m", "find")]),
        {"role": "tool", "content": "z", "tool_call_id": "m"},
        said(content="Done."),
        said(reasoning_content="More."),
        {"role": "user", "content": "Stop."},
    ]


def test_results_of_gemini_stand_before_a_picture_between_them_which_is_noted():
    results = [
        {"functionResponse": {"id": n, "name": "ls", "response": {"output": n}}} for n in "xy"
    ]
    picture = {"inlineData": {"mimeType": "image/png", "data": "AAAA"}}
    parts = [results[0], picture, results[1]]
    with noted() as notes:
        messages = gemini.messages([{"role": "user", "parts": parts}], "a")
    assert [m["role"] for m in messages] == ["tool", "tool", "user"]
    assert notes == {gemini.MOVED: 1}


RESPONSE = {"output": "x", "rows": 3}
"""A response that says more than its output."""


def test_geminis_contents_become_messages_in_their_order():
    given = [
        {
            "role": "user",
            "parts": [{"text": "Look."}, {"inlineData": {"mimeType": "image/png", "data": "AAAA"}}],
        },
        {
            "role": "model",
            "parts": [
                {"text": "Hm.", "thought": True},
                {"functionCall": {"name": "ls", "args": {"n": 1}}, "thoughtSignature": "x"},
                {"functionCall": {"name": "ls", "args": {}, "id": "c9"}},
            ],
        },
        {
            "role": "user",
            "parts": [
                {"functionResponse": {"name": "ls", "response": {"output": "x"}}},
                {"functionResponse": {"name": "ls", "id": "c9", "response": RESPONSE}},
            ],
        },
        {"role": "model", "parts": [{"text": "A."}, {"text": "B."}]},
    ]
    user, reply, first, second, last = gemini.messages(given, "a")
    assert user == {"role": "user", "content": [{"type": "text", "text": "Look."}, IMAGE]}
    assert reply["reasoning_content"] == "Hm."
    assert [c["id"] for c in reply["tool_calls"]] == ["call_1_ls", "c9"]
    assert first == {"role": "tool", "content": "x", "tool_call_id": "call_1_ls"}
    assert second["tool_call_id"] == "c9"
    assert json.loads(second["content"]) == RESPONSE
    assert last == said(content="A.\nB.")


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
TOOL = {
    "type": "function",
    "function": {"name": "ls", "description": "List.", "parameters": SCHEMA},
}


@pytest.mark.parametrize(
    ("dialect", "given"),
    [
        (anthropic, [{"name": "ls", "description": "List.", "input_schema": SCHEMA}]),
        (
            responses,
            [{"type": "function", "name": "ls", "description": "List.", "parameters": SCHEMA}],
        ),
        (
            gemini,
            [
                {
                    "functionDeclarations": [
                        {"name": "ls", "description": "List.", "parameters": SCHEMA}
                    ]
                }
            ],
        ),
        (responses, [TOOL]),
    ],
)
def test_tool_definitions_become_openais(dialect, given):
    assert dialect.tools(given) == [TOOL]
    assert dialect.tools([]) is None


def test_functions_of_a_namespace_have_its_name_as_the_model_calls_them():
    inner = [{"type": "function", "name": "rain", "parameters": {}}]
    given = [{"type": "namespace", "name": "mcp__sky", "tools": inner}, {"type": "web_search"}]
    names = [tool["function"]["name"] for tool in responses.tools(given)]
    assert names == ["mcp__sky.rain", "web_search"]


@pytest.mark.parametrize(
    ("part", "source"),
    [
        (IMAGE, PNG),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, PNG),
        (
            {"type": "input_image", "image_url": "https://a/b.png"},
            {"type": "url", "url": "https://a/b.png"},
        ),
        ({"type": "input_image", "file_id": "f"}, {"type": "file", "file_id": "f"}),
        ({"type": "image"}, None),
    ],
)
def test_pictures_have_one_form_whatever_the_api(part, source):
    found = media_part(part)
    assert (found and found["source"]) == source


def test_pictures_are_marked_in_the_text_for_the_tokenizer():
    message = {"role": "user", "content": [{"type": "text", "text": "See:"}, IMAGE]}
    assert len(media_in(message)) == 1
    assert marked(message)["content"][1] == {"type": "text", "text": "[image]"}
    assert marked({"role": "user", "content": "x"}) == {"role": "user", "content": "x"}
