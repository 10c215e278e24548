"""Calls that lost ids of tool calls, and calls of other APIs, are refused by name."""

import json

import pytest

from schemas.errors import RolloutError
from tests.rollout_io.formats.test_calls import call, read_calls, write


def streamed(tmp_path, *chunks, **request):
    choices = [{"index": 0, **chunk} for chunk in chunks]
    answer = [{"choices": [choice]} for choice in choices]
    answer[0]["prompt_token_ids"] = [1, 2]
    record = {"session": "a/0", "request": {"messages": []} | request, "response": answer}
    return write(tmp_path / "calls.jsonl", [record])


def called(name=None, arguments=""):
    function = {"arguments": arguments} | ({} if name is None else {"name": name})
    return {"delta": {"tool_calls": [{"index": 0, "function": function}]}}


def test_a_stream_that_lost_the_ids_of_a_tool_call_is_refused(tmp_path):
    lost, kept = called("get_weather"), called(arguments="{}") | {"token_ids": [3]}
    role = {"delta": {"role": "assistant", "content": ""}}
    assert len(read_calls([streamed(tmp_path, role, kept)])) == 1
    for chunks in ((role, lost, kept), (kept, {"delta": {"content": "x"}}), ({"text": "x"}, kept)):
        with pytest.raises(RolloutError) as caught:
            read_calls([streamed(tmp_path, *chunks)])
        assert caught.value.rule == "no_token_ids"
        assert "streamed chunk" in caught.value.where
        assert "other chunks have ids" in str(caught.value)
    assert len(read_calls([streamed(tmp_path, {"text": "x"}, kept, echo=True)])) == 1


def tool_call(sampled, name, arguments, **request):
    """A call whose sampled tokens are the letters of a text."""
    ids = [ord(letter) for letter in sampled]
    record = call("a/0", [1], ids, request={"messages": []} | request)
    (choice,) = record["response"]["choices"]
    function = {"name": name, "arguments": arguments}
    choice["message"] = {"content": None, "tool_calls": [{"id": "c", "function": function}]}
    choice["logprobs"] = {"content": [{"token": t, "logprob": -0.5} for t in sampled]}
    return record


@pytest.mark.parametrize(
    ("sampled", "arguments", "request_fields"),
    [
        (
            '{"name": "find", "arguments": {"city": "Z\\u00fcrich", "n": 1}}',
            '{"city":"Zürich","n":1}',
            {},
        ),
        ("<function=find><parameter=city>\nNew York\n</parameter>", '{"city": "New York"}', {}),
        ('find(city="a\\nb")', '{"city": "a\\nb"}', {}),
        ('{"city": "x"}', '{"city": "x"}', {"tool_choice": {"function": {"name": "find"}}}),
        ("find not json", "not json", {}),
    ],
)
def test_tool_calls_in_any_syntax_agree_with_their_tokens(
    tmp_path, sampled, arguments, request_fields
):
    record = tool_call(sampled, "find", arguments, **request_fields)
    assert len(read_calls([write(tmp_path / "a.jsonl", [record])])) == 1


@pytest.mark.parametrize("sampled", ['{"city": "Oslo"}', 'find {"city": "Os', "find(Oslo)"])
def test_tokens_that_lack_a_word_of_the_tool_call_are_refused(tmp_path, sampled):
    record = tool_call(sampled, "find", '{"city": "Oslo"}')
    with pytest.raises(RolloutError) as caught:
        read_calls([write(tmp_path / "a.jsonl", [record])])
    assert caught.value.rule == "logprob_tokens"
    assert "a word of the tool calls" in str(caught.value)


OTHER_APIS = {
    "Anthropic's Messages API": {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": "x"}],
    },
    "OpenAI's Responses API": {"object": "response", "output": []},
    "Gemini's API": {"candidates": [{"content": {"parts": [{"text": "x"}]}}]},
    "SGLang's /generate": {"text": "x", "output_ids": [1], "meta_info": {"id": "r"}},
    "Ollama's API": {"message": {"content": "x"}, "done": True},
    "Text Generation Inference": {"generated_text": "x"},
}


TEXT_IS_READ = {"Anthropic's Messages API", "Gemini's API", "Ollama's API"}


@pytest.mark.parametrize("name", OTHER_APIS)
def test_a_response_of_another_api_is_named(tmp_path, name):
    rule = "no_token_ids" if name in TEXT_IS_READ else "other_api"
    record = call("a/0", [1], [2]) | {"response": OTHER_APIS[name]}
    with pytest.raises(RolloutError) as caught:
        read_calls([write(tmp_path / "a.jsonl", [record])])
    assert (caught.value.rule, name in str(caught.value)) == (rule, True)


@pytest.mark.parametrize(
    ("first", "name"),
    [
        ({"type": "message_start", "message": {}}, "Anthropic's"),
        ({"type": "response.created", "response": {}}, "OpenAI's Responses"),
        ({"candidates": [{}]}, "Gemini's"),
    ],
)
def test_a_stream_of_another_api_is_named(tmp_path, first, name):
    for answer in ([first, first], [f"data: {json.dumps(first)}"]):
        record = call("a/0", [1], [2]) | {"response": answer}
        with pytest.raises(RolloutError) as caught:
            read_calls([write(tmp_path / "a.jsonl", [record])])
        assert (caught.value.rule, name in str(caught.value)) == ("other_api", True)


def test_ids_in_sglangs_fields_are_named_with_the_fields_to_write(tmp_path):
    record = call("a/0", [1], [2], request={"messages": [], "return_token_ids": True})
    (choice,) = record["response"]["choices"]
    choice["response_token_ids"] = choice.pop("token_ids")
    choice["meta_info"] = {"output_token_logprobs": [[-0.5, 2, None]]}
    with pytest.raises(RolloutError) as caught:
        read_calls([write(tmp_path / "a.jsonl", [record])])
    assert caught.value.rule == "other_api"
    assert "SGLang's fields (`response_token_ids` and `meta_info`)" in str(caught.value)
    assert "`choices[i].token_ids`" in (caught.value.hint or "")


TOO_LONG = "This model has 4096 tokens"
ERRORS = [
    {"error": {"message": TOO_LONG, "code": 400}},
    {"object": "error", "message": TOO_LONG, "code": 400},
    {"detail": [{"loc": ["body"], "msg": TOO_LONG}]},
    {"message": TOO_LONG},
]


@pytest.mark.parametrize("response", ERRORS)
@pytest.mark.parametrize("is_stream", [False, True])
def test_an_error_of_an_engine_is_quoted(tmp_path, response, *, is_stream):
    record = {"session": "a/0", "request": {}, "response": [response] if is_stream else response}
    with pytest.raises(RolloutError, match=f"the engine returned an error: .*{TOO_LONG}") as caught:
        read_calls([write(tmp_path / "calls.jsonl", [record])])
    assert caught.value.rule == "no_response"
