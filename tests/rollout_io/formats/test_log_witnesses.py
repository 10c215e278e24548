"""What a log says twice is compared: a call that contradicts itself is refused by name."""

import copy
import json

import pytest

from rollout_io import convert, read_log
from rollout_io.conversion.plan import Keywords
from rollout_io.formats.parsing.witnesses import holds
from schemas.errors import RolloutError
from tests.conftest import ROOT

WIRE = ROOT / "tests" / "data" / "peers" / "vllm"
CALLS = Keywords(format="calls")


def wire(name, session):
    lines = (WIRE / f"{name}.calls.jsonl").read_text().splitlines()
    records = map(json.loads, lines)
    return next(record for record in records if record["session"] == session)


def read(tmp_path, *records):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_log([path], **CALLS).to_pylist()


def refusal(tmp_path, *records):
    with pytest.raises(RolloutError) as caught:
        read(tmp_path, *records)
    assert str(caught.value.where).startswith(str(tmp_path / "log.jsonl") + ":1")
    return caught.value.rule


def with_ids(record, ids):
    chunk = next(c for c in record["response"] if c["choices"] and c["choices"][0].get("token_ids"))
    chunk["choices"][0]["token_ids"] = ids
    return record


@pytest.mark.parametrize(
    "ids", [["7"], [[7]], [7.5], [None], [True], {"7": 8}, 7, "7", "7,8", "", True, 1.5]
)
def test_ids_that_are_no_whole_numbers_are_refused_whole_and_streamed(ids, tmp_path):
    answered, question = wire("chat", "chat/0"), wire("chat", "chat/0")
    answered["response"]["choices"][0]["token_ids"] = ids
    question["response"]["prompt_token_ids"] = ids
    for record in (answered, question, with_ids(wire("chat", "chat/1"), ids)):
        assert refusal(tmp_path, record) in {"record_type", "nonempty_response", "nonempty_prompt"}


def test_another_prompt_in_a_later_chunk_or_choice_is_refused(tmp_path):
    for name, session in (("chat", "chat/1"), ("chat", "chat/0"), ("completions", "text/1")):
        record = wire(name, session)
        chunks = record["response"] if isinstance(record["response"], list) else None
        if chunks is None:
            record["response"]["choices"][0]["prompt_token_ids"] = [5, 6]
        else:
            at = next(c for c in reversed(chunks) if c["choices"])
            (at if name == "chat" else at["choices"][0])["prompt_token_ids"] = [5, 6]
        assert refusal(tmp_path, record) == "conflicting_ids"


def test_a_prompt_that_every_chunk_repeats_is_read_once(tmp_path):
    record = wire("chat", "chat/1")
    expected = read(tmp_path, record)
    prompt = expected[0]["prompt_token_ids"]
    for chunk in record["response"]:
        chunk["prompt_token_ids"] = prompt
    assert read(tmp_path, record) == expected


@pytest.mark.parametrize(
    "chunk",
    [{"error": {"message": "engine died", "code": 500}}, {"object": "error", "message": "died"}],
)
def test_an_error_in_the_middle_of_a_stream_is_refused(chunk, tmp_path):
    record = wire("chat", "chat/1")
    chunks = record["response"]
    record["response"] = [*chunks[:5], chunk, *chunks[5:]]
    assert refusal(tmp_path, record) == "no_response"
    record["response"] = [f"data: {json.dumps(c)}" for c in [*chunks[:5], chunk]]
    assert refusal(tmp_path, record) == "no_response"
    assert refusal(tmp_path, record | {"response": chunk}) == "no_response"


def test_a_chunk_with_log_probabilities_of_other_tokens_is_refused(tmp_path):
    record = wire("chat", "chat/1")
    chunks = [c for c in record["response"] if c["choices"] and c["choices"][0].get("logprobs")]
    first, second = (chunk["choices"][0]["logprobs"]["content"] for chunk in chunks[:2])
    second.insert(0, first.pop())
    assert refusal(tmp_path, record) == "lengths_align"


@pytest.mark.parametrize("indices", [(0, 0), (0, 2), (1, 2), (-1, 0)])
@pytest.mark.parametrize("session", ["chat_n2/0", "chat_n2/1"])
def test_choices_that_are_missing_or_there_twice_are_refused(indices, session, tmp_path):
    record = wire("chat", session)
    response = record["response"]
    for chunk in response if isinstance(response, list) else [response]:
        for choice in chunk["choices"]:
            choice["index"] = indices[choice["index"]]
    if indices == (0, 0) and session == "chat_n2/1":
        return  # of one choice, as far as a stream tells; `usage` and text are right
    assert refusal(tmp_path, record) == "choice_index"


@pytest.mark.parametrize("what", ["prompt_tokens", "completion_tokens"])
@pytest.mark.parametrize(
    ("name", "session"),
    [("chat", "chat/0"), ("chat", "chat/1"), ("chat", "chat_n2/1"), ("completions", "text_n2/0")],
)
def test_counts_of_the_engine_that_contradict_the_ids_are_refused(name, session, what, tmp_path):
    record = wire(name, session)
    response = record["response"]
    usage = response[-1]["usage"] if isinstance(response, list) else response["usage"]
    usage[what] += 1
    assert refusal(tmp_path, record) == "usage_counts"


def test_counts_that_nobody_made_are_no_counts(tmp_path):
    record = wire("chat", "chat/0")
    expected = read(tmp_path, record)
    for usage in (None, {}, {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}):
        record["response"]["usage"] = usage
        assert read(tmp_path, record) == expected


def named(record):
    """As vLLM answers with `return_tokens_as_token_ids`."""
    choice = record["response"]["choices"][0]
    for token, i in zip(choice["logprobs"]["content"], choice["token_ids"], strict=True):
        token["token"] = f"token_id:{i}"
    return record


def shift(values):
    values.append(values.pop(0))


def test_log_probabilities_of_named_tokens_must_be_the_responses(tmp_path):
    record = named(wire("chat", "chat/0"))
    assert read(tmp_path, record)[0]["response_ids"]
    shift(record["response"]["choices"][0]["logprobs"]["content"])
    assert refusal(tmp_path, record) == "logprob_tokens"
    record["response"]["choices"][0]["logprobs"]["content"][3]["token"] = "of another kind"
    assert refusal(tmp_path, record) == "logprob_tokens"


@pytest.mark.parametrize("name", ["chat", "tools"])
def test_log_probabilities_of_tokens_must_spell_the_response(name, tmp_path):
    whole = wire(name, "chat/0" if name == "chat" else "tool_forced/0")
    shift(whole["response"]["choices"][0]["logprobs"]["content"])
    assert refusal(tmp_path, whole) == "logprob_tokens"


@pytest.mark.parametrize(
    ("tokens", "text", "is_held"),
    [
        (" a b", " a\ufffd b", True),
        (" a\ufffd b", " a b", True),
        (" caf\u00e9", " caf\u00e9\ufffd", True),
        (" caf\u00e9", " caf\u00e9\ufffd!", False),
        ("\u4f60\u597d\ufffd\ufffd", "\u4f60\u597d\U0001f600", True),
        ("\u4f60\u597d\ufffd\ufffd", "\u518d\u89c1\U0001f600", False),
        ("\ufffd\u4f60\u597d", "\u518d\u4f60\u597d", True),
        ("\u4f60\u597d", "\u518d\ufffd", False),
        ("\u4f60\u597d", "\u4f60\ufffd", True),
        ("a\ufffd\ufffdb", "a\u518d\u89c1b", True),
        ("a\ufffdb", "a\u518d\u89c1b", False),
        ("a\ufffdb", "axb", False),
        ("\ufffda", "a\u518d", False),
    ],
)
def test_letters_of_every_script_are_compared_around_fragments(tokens, text, is_held):
    assert holds(tokens, text) is is_held


def test_log_probabilities_of_another_answer_are_refused(tmp_path):
    lines = (WIRE / "chat.calls.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines[:2]]
    choices = [record["response"]["choices"][0] for record in records]
    choices[0]["logprobs"], choices[1]["logprobs"] = choices[1]["logprobs"], choices[0]["logprobs"]
    assert refusal(tmp_path, records[0]) == "logprob_tokens"


def test_shifted_log_probabilities_of_a_text_completion_are_refused(tmp_path):
    record = wire("completions", "text/0")
    logprobs = record["response"]["choices"][0]["logprobs"]
    shift(logprobs["tokens"])
    assert refusal(tmp_path, record) == "logprob_tokens"
    record = wire("completions", "text/0")
    record["response"]["choices"][0]["logprobs"]["text_offset"].pop()
    assert refusal(tmp_path, record) == "logprob_tokens"


def as_written(choice):
    """Ways in which engines spell the tokens of one and the same answer."""
    text = choice["message"]["content"]
    yield [*text]
    yield [*text.replace(" ", "\u2581")]
    yield [*text.replace(" ", "\u0120")]
    yield [*text.replace(" ", "")]
    yield ["<think>", "hm", "</think>", *text, "<|im_end|>"]
    yield [*text[:7], "<|special|>", *text[7:]]


def test_the_spellings_of_engines_are_taken(tmp_path):
    record = wire("chat", "chat/0")
    for content in ("one two three four", "caf\u00e9 am \u6771\u4eac \U0001f600 ok"):
        choice = copy.deepcopy(record["response"]["choices"][0])
        choice["message"]["content"] = content
        spellings = [*as_written(choice), [*content.encode().decode("ascii", "replace")]]
        for tokens in spellings:
            values = [{"token": token, "logprob": -1.0} for token in tokens]
            made = {**choice, "logprobs": {"content": values}, "token_ids": [7] * len(tokens)}
            response = record["response"] | {"choices": [made], "usage": None}
            assert read(tmp_path, record | {"response": response})[0]["rollout_logprobs"]


def test_a_call_that_contradicts_itself_takes_its_session_with_it_and_no_other(tmp_path):
    bad, good = wire("chat", "chat/0"), wire("tools", "tool_free/0")
    bad["response"]["usage"]["completion_tokens"] = 3
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in (bad, good)))
    done = convert([path], tmp_path / "ds", format="calls", on_error="skip")
    assert (done.summary.num_written, done.summary.num_rejected) == (1, 1)
    (line,) = (tmp_path / "ds.rejected.jsonl").read_text().splitlines()
    assert "usage_counts" in line


def test_every_real_log_of_an_engine_agrees_with_itself():
    logs = [*WIRE.glob("*.calls.jsonl"), ROOT / "examples" / "shop.calls.jsonl"]
    whole = [log for log in logs if log.name != "litellm.calls.jsonl"]  # it loses a prompt
    assert len(whole) == 4
    assert all(read_log([log], **CALLS).num_rows for log in whole)


def called(tool_choice):
    """A call whose sampled tokens have the arguments of a tool call, but not its name."""
    tokens = ['{"', "city", '": "', "Oslo", '"}']
    function = {"name": "weather", "arguments": "".join(tokens)}
    tool_calls = [{"id": "c", "type": "function", "function": function}]
    choice = {
        "message": {"role": "assistant", "content": None, "tool_calls": tool_calls},
        "token_ids": [3, 4, 5, 6, 7],
        "logprobs": {"content": [{"token": token, "logprob": -0.5} for token in tokens]},
    }
    request = {"messages": [{"role": "user", "content": "?"}], "tool_choice": tool_choice}
    response = {"prompt_token_ids": [1, 2], "choices": [choice]}
    return {"session": "a/0", "request": request, "response": response}


def test_the_name_of_a_tool_is_sampled_unless_the_request_forces_it(tmp_path):
    forced = {"type": "function", "function": {"name": "weather"}}
    assert read(tmp_path, called(forced))[0]["response_ids"] == [3, 4, 5, 6, 7]
    assert refusal(tmp_path, called("auto")) == "logprob_tokens"


def test_tokens_that_are_spelled_as_in_the_vocabulary_are_compared_by_their_ascii_letters():
    spelled = "\u0120caf\u00c3\u00a9\u0120au\u0120lait"
    assert holds(spelled, " café au lait")
    assert not holds(spelled, " café au lait!")


def test_a_session_of_text_beside_one_with_ids_is_tokenized(tmp_path, smollm2_dir):
    exact, text = called("none"), called("none")
    exact["response"]["choices"] = [{"token_ids": [3, 4]}]
    text["session"] = "b/0"
    answer = {"message": {"role": "assistant", "content": "Hello."}, "finish_reason": "stop"}
    text["response"] = {"choices": [answer]}
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in (exact, text)))
    table = read_log([path], **CALLS, tokenizer=str(smollm2_dir))
    assert table["token_source"].to_pylist() == ["engine", "retokenized"]
