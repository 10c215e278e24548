import json

import numpy as np
import pytest
from transformers import AutoTokenizer

import rollout_io
from rollout_io import read_log
from rollout_io.conversion.plan import Keywords
from schemas.errors import RolloutError
from tests.conftest import ROOT

WIRE = ROOT / "tests" / "data" / "peers" / "vllm"


def rows_of(name):
    return read_log([WIRE / f"{name}.calls.jsonl"], format="calls").to_pylist()


def raw_calls(name):
    with (WIRE / f"{name}.calls.jsonl").open() as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize("name", ["chat", "completions", "tools"])
def test_a_streamed_response_joined_is_the_response_that_comes_whole(name):
    rows = rows_of(name)
    whole = [row for row in rows if row["repetition_id"] == 0]
    streamed = [row for row in rows if row["repetition_id"] == 1]
    assert len(whole) == len(streamed) >= 3
    for a, b in zip(whole, streamed, strict=True):
        for key in ("prompt_token_ids", "response_ids"):
            assert a[key] == b[key]
        if name != "tools":  # vLLM's stream says tool_calls where the whole response says length
            assert a["stop_reason"] == b["stop_reason"]
        np.testing.assert_allclose(a["rollout_logprobs"], b["rollout_logprobs"], atol=0.05)


def test_joined_text_and_tool_calls_read_as_the_whole_ones():
    for name in ("chat", "completions", "tools"):
        # of a call that is cut before it parses, vLLM's stream leaves out the text
        rows = [row for row in rows_of(name) if row["instance_id"] != "tool_forced"]
        texts = [[r["response_text"] for r in rows if r["repetition_id"] == i] for i in (0, 1)]
        assert [_without_ids(t) for t in texts[0]] == [_without_ids(t) for t in texts[1]]
        assert name != "tools" or any("get_weather" in t for t in texts[1])


def _without_ids(text):
    """Tool calls have ids that are made up anew for every request."""
    head, bracket, tail = text.partition("[{")
    if not bracket:
        return text
    calls = json.loads(bracket + tail)
    return head.strip() + json.dumps([call["function"] for call in calls])


def test_each_prompt_of_a_batch_goes_with_its_own_choice():
    (record,) = [c for c in raw_calls("completions") if c["session"] == "text_batch/0"]
    rows = [r for r in rows_of("completions") if r["trajectory_id"] == "text_batch_0"]
    choices = record["response"]["choices"]
    assert len({tuple(c["prompt_token_ids"]) for c in choices}) == len(choices) > 1
    assert [r["prompt_token_ids"] for r in rows] == [c["prompt_token_ids"] for c in choices]


def test_litellm_keeps_ids_beside_the_choice_and_loses_those_of_a_streamed_prompt(tmp_path):
    whole, streamed = (WIRE / "litellm.calls.jsonl").read_text().splitlines()
    (tmp_path / "whole.jsonl").write_text(whole)
    (row,) = read_log([tmp_path / "whole.jsonl"]).to_pylist()
    fields = json.loads(whole)["response"]["choices"][0]["provider_specific_fields"]
    assert row["response_ids"] == fields["token_ids"]
    (tmp_path / "streamed.jsonl").write_text(streamed)
    with pytest.raises(RolloutError, match=r"no prompt token ids.*\[no_token_ids\]"):
        read_log([tmp_path / "streamed.jsonl"])


def test_server_sent_lines_are_joined_as_their_objects_are(tmp_path):
    records = [c for c in raw_calls("tools") if isinstance(c["response"], list)]
    objects = "".join(json.dumps(c) + "\n" for c in records)
    for record in records:
        lines = [f"data: {json.dumps(chunk)}" for chunk in record["response"]]
        record["response"] = [": keep-alive", *lines, "", "data: [DONE]"]
    lines = "".join(json.dumps(c) + "\n" for c in records)
    for record in records:
        record["response"] = "\n".join(record["response"])
    text = "".join(json.dumps(c) + "\n" for c in records)
    found = []
    for name, content in (("objects", objects), ("lines", lines), ("text", text)):
        (tmp_path / f"{name}.jsonl").write_text(content)
        found.append(read_log([tmp_path / f"{name}.jsonl"]).drop_columns("source"))
    assert found[0].equals(found[1])
    assert found[0].equals(found[2])


def chunk(*calls, ids=None, **more):
    delta = {"role": "assistant", "tool_calls": list(calls)} if calls else {"content": ""}
    choice = {"index": 0, "delta": delta, "finish_reason": None, "token_ids": ids}
    return {"object": "chat.completion.chunk", "choices": [choice], **more}


def piece(index, id=None, name=None, arguments=None):
    function = {"name": name, "arguments": arguments}
    function = {key: value for key, value in function.items() if value is not None}
    return {"index": index, "id": id, "function": function}


PARALLEL = {
    "an index each": [[piece(0, "a", "ls", '{"n":1}')], [piece(1, "b", "ls", '{"n":2}')]],
    "one index": [[piece(0, "a", "ls", '{"n":1}')], [piece(0, "b", "ls", '{"n":2}')]],
    "one index in one chunk": [[piece(0, "a", "ls", '{"n":1}'), piece(0, "b", "ls", '{"n":2}')]],
    "one index in pieces": [
        [piece(0, "a", "ls")],
        [piece(0, "a", None, '{"n"')],
        [piece(0, "", None, ":1}")],
        [piece(0, "b", "ls", "")],
        [piece(0, None, None, '{"n":2}')],
    ],
}


@pytest.mark.parametrize("layout", PARALLEL)
def test_streamed_calls_are_as_many_as_their_ids_whatever_their_index(layout, tmp_path):
    pieces = [chunk(prompt_token_ids=[1, 2, 3])]
    pieces += [chunk(*calls, ids=[10 + i]) for i, calls in enumerate(PARALLEL[layout])]
    body = "".join(f"data: {json.dumps(each)}\n\n" for each in pieces) + "data: [DONE]\n\n"
    request = {"model": "m", "messages": [{"role": "user", "content": "List both."}]}
    path = tmp_path / "a.calls.jsonl"
    path.write_text(json.dumps({"session": "a/0", "request": request, "response": body}))
    (row,) = read_log([path], format="calls").to_pylist()
    calls = json.loads(row["response_text"])
    functions = [{"name": "ls", "arguments": f'{{"n":{n}}}'} for n in (1, 2)]
    assert [(c["id"], c["function"]) for c in calls] == [*zip("ab", functions, strict=True)]


@pytest.mark.model
def test_streamed_calls_that_share_an_index_agree_with_their_ids(smollm2_dir, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(str(smollm2_dir))
    calls = [{"name": "weather", "arguments": {"city": city}} for city in ("Oslo", "Rome")]
    texts = [f"<tool_call>\n{json.dumps(each)}\n</tool_call>\n" for each in calls]
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    told = [json.dumps(each["arguments"]) for each in calls]
    pieces = [piece(0, name, "weather", text) for name, text in zip("ab", told, strict=True)]
    prompt = tokenizer.encode("<|im_start|>user\nWeather?<|im_end|>\n", add_special_tokens=False)
    chunks = [chunk(prompt_token_ids=prompt)]
    chunks += [chunk(each, ids=own) for each, own in zip(pieces, ids, strict=True)]
    body = "".join(f"data: {json.dumps(each)}\n\n" for each in chunks)
    request = {"model": "m", "messages": [{"role": "user", "content": "Weather?"}]}
    path = tmp_path / "a.calls.jsonl"
    path.write_text(json.dumps({"session": "a/0", "request": request, "response": body}))
    choices = Keywords(format="calls", tokenizer=str(smollm2_dir))
    made = rollout_io.convert(path, tmp_path / "ds", **choices)
    assert (made.summary.num_rows, made.summary.num_rejected) == (1, 0)
