"""The ids that truncated sampling kept, in recorded and in logged calls."""

import asyncio
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.harness.launchers import outcome_of
from rollout_io import read_log
from tests.helpers.fake_engine import FakeEngine, answer, event, running
from tests.helpers.harness_helpers import Scripted
from tests.helpers.recorder_helpers import CHAT, TEXT, recording, rows
from tests.pipelines.harness.test_recorded_calls import calling

EXCLUDED = -9999.0


def named(token):
    return f"token_id:{token}"


def entries(kept, num):
    """The most likely tokens: the kept ones, equally likely, then excluded ones."""
    likely = dict.fromkeys(kept, -math.log(len(kept)))
    return list((likely | dict.fromkeys(range(900, 950), EXCLUDED)).items())[:num]


def response(sets, num, *, is_chat, is_stream):
    """An answer that samples the last id of each set; of a stream, its chunks."""
    parts = []
    for kept in sets:
        pairs, logprob = entries(kept, num), -math.log(len(kept))
        if is_chat:
            top = [{"token": named(token), "logprob": p} for token, p in pairs]
            one = {"token": named(kept[-1]), "logprob": logprob, "top_logprobs": top}
            logprobs = {"content": [one]}
        else:
            table = {named(token): p for token, p in pairs} | {named(kept[-1]): logprob}
            logprobs = {"tokens": [named(kept[-1])], "token_logprobs": [logprob]}
            logprobs["top_logprobs"] = [table]
        parts.append({"index": 0, "token_ids": [kept[-1]], "logprobs": logprobs})
    end = {"index": 0, "finish_reason": "stop"}
    key = "delta" if is_stream else "message"
    said = {key: {"role": "assistant", "content": "x"}} if is_chat else {"text": "x"}
    prompt = {"prompt_token_ids": [1, 2]}
    if is_stream:
        chunks = [{"id": "a", "choices": [part | said]} for part in parts]
        chunks[0] = chunks[0] | prompt if is_chat else chunks[0]
        chunks[0]["choices"][0] |= {} if is_chat else prompt
        return [*chunks, {"id": "a", "choices": [end | ({"delta": {}} if is_chat else {})]}]
    whole = parts[0] | said | end | ({} if is_chat else prompt)
    whole["token_ids"] = [part["token_ids"][0] for part in parts]
    whole["logprobs"] = {
        name: [value for part in parts for value in part["logprobs"][name]]
        for name in parts[0]["logprobs"]
    }
    return {"id": "a", "choices": [whole]} | (prompt if is_chat else {})


class TruncatingEngine(FakeEngine):
    """Answers with the sets and as many likely tokens as it is asked for."""

    sets = ([5, 6, 7], [8], [9, 3])

    async def other(self, body, path, send):
        self.requests.append(body)
        is_chat = "chat" in path
        num = body.get("top_logprobs" if is_chat else "logprobs") or 0
        made = response(self.sets, num, is_chat=is_chat, is_stream=bool(body.get("stream")))
        if not body.get("stream"):
            await answer(send, made)
            return True
        head = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        content = b"".join(map(event, made)) + b"data: [DONE]\n\n"
        await send({"type": "http.response.body", "body": content})
        return True


def recorded(out, bodies, mode="processed"):
    """The requests that the engine got, the replies, and the rows."""
    app = TruncatingEngine()

    async def main(url):
        replies = []
        async with recording(out, url, logprobs_mode=mode) as client:
            for body in bodies:
                path = "chat/completions" if "messages" in body else "completions"
                reply = await client.post(f"/s/a/0/v1/{path}", json=body)
                assert reply.status_code == 200
                replies.append(reply.text)
            await client.post("/s/a/0/end", json={"reward": 1.0})
        return replies

    with running(app) as url:
        replies = asyncio.run(main(url))
    return app.requests, replies, rows(out, "sampling_support", "response_ids")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", [CHAT, TEXT])
def test_sets_are_asked_for_recorded_and_not_shown(tmp_path, body, stream):
    asked = body | {"stream": stream, "top_k": 3}
    (sent,), (reply,), (row,) = recorded(tmp_path / "ds", [asked])
    assert sent["top_logprobs" if "messages" in body else "logprobs"] == 4
    assert sent["return_tokens_as_token_ids"] is True
    assert row["sampling_support"] == [list(kept) for kept in TruncatingEngine.sets]
    assert row["response_ids"] == [7, 8, 3]
    assert "token_id" not in reply.replace("token_ids", "")


UNASKED = [{}, {"top_k": 21}, {"top_k": -1}, {"top_k": 3, "temperature": 0}]


def test_sets_are_not_asked_for_where_they_cannot_be_had(tmp_path):
    sent, _, found = recorded(tmp_path / "ds", [CHAT | fields for fields in UNASKED])
    for body in sent:
        assert "top_logprobs" not in body
        assert "return_tokens_as_token_ids" not in body
    assert {row.get("sampling_support") for row in found} == {None}
    for mode in ("raw", None):
        (body,), _, (row,) = recorded(tmp_path / f"{mode}", [CHAT | {"top_k": 3}], mode)
        assert "top_logprobs" not in body
        assert row.get("sampling_support") is None


def test_what_a_client_asks_for_itself_is_kept_and_gives_sets_if_it_is_enough(tmp_path):
    own = {"top_k": 3, "logprobs": True, "return_tokens_as_token_ids": True}
    bodies = [CHAT | own | {"top_logprobs": number} for number in (2, 3)]
    sent, replies, found = recorded(tmp_path / "ds", bodies)
    assert [body["top_logprobs"] for body in sent] == [2, 3]
    assert [len(json.loads(r)["choices"][0]["logprobs"]["content"]) for r in replies] == [3, 3]
    expected = [list(kept) for kept in TruncatingEngine.sets]
    assert [row["sampling_support"] for row in found] == [None, expected]


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_of_a_harness_have_the_sets_of_a_server(tokenizer, stream):
    app = TruncatingEngine()

    with running(app) as url:
        own = {"engine": "vllm", "urls": (url,), "top_k": 3}
        async with calling(Scripted(tokenizer, "one"), tokenizer, **own) as (calls, opened, *rest):
            answer = await rest[-1].post("v1/chat/completions", json=CHAT | {"stream": stream})
            assert "token_id:" not in answer.text
            (step,), fault = await calls.steps(opened, outcome_of(1.0, "t"))
    assert fault is None
    assert app.requests[0]["top_logprobs"] == 4
    assert step.sampling_support == [list(kept) for kept in TruncatingEngine.sets]


SETS = st.lists(
    st.lists(st.integers(0, 800), min_size=1, max_size=20, unique=True), min_size=1, max_size=6
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("logs")


@settings(max_examples=30)
@given(sets=SETS, num=st.integers(1, 20), is_chat=st.booleans(), is_stream=st.booleans())
def test_a_logged_call_has_its_sets_if_it_lists_every_kept_token(
    folder, sets, num, is_chat, is_stream
):
    made = response(sets, num, is_chat=is_chat, is_stream=is_stream)
    request = {"top_k": 20} | ({"messages": []} if is_chat else {"prompt": "x"})
    log = folder / "a.calls.jsonl"
    log.write_text(json.dumps({"session": "a/0", "request": request, "response": made}) + "\n")
    (row,) = read_log([log], format="calls", logprobs_mode="processed").to_pylist()
    sampled = [set() if is_chat else {kept[-1]} for kept in sets]  # text lists it anyway
    listed = [{*dict(entries(kept, num)), *own} for kept, own in zip(sets, sampled, strict=True)]
    is_whole = all(set(kept) <= tokens for kept, tokens in zip(sets, listed, strict=True))
    found = row.get("sampling_support")
    assert (found is not None) == is_whole
    if is_whole:
        assert list(map(sorted, found)) == list(map(sorted, sets))
    assert row["response_ids"] == [kept[-1] for kept in sets]


@pytest.mark.parametrize("top", [3, "x", [3], [{"token": "x"}], [{"token": "a", "logprob": 0.0}]])
def test_likely_tokens_that_cannot_be_read_give_no_sets(tmp_path, top):
    made = response([[5]], 3, is_chat=True, is_stream=False)
    made["choices"][0]["logprobs"]["content"][0]["top_logprobs"] = top
    call = {"session": "a/0", "request": {"messages": [], "top_k": 3}, "response": made}
    log = tmp_path / "a.calls.jsonl"
    log.write_text(json.dumps(call) + "\n")
    (row,) = read_log([log], format="calls", logprobs_mode="processed").to_pylist()
    assert row.get("sampling_support") is None
    assert row["response_ids"] == [5]


@pytest.mark.parametrize("mode", ["raw", None])
def test_sets_need_processed_log_probabilities_unless_the_log_names_them(tmp_path, mode):
    made = response([[5, 6]], 3, is_chat=True, is_stream=False)
    calls = [{"session": f"a/{i}", "request": {"top_k": 3}, "response": made} for i in range(2)]
    calls[1] = json.loads(json.dumps(calls[1]))
    calls[1]["response"]["choices"][0]["sampling_support"] = [[4, 6]]
    log = tmp_path / "a.calls.jsonl"
    log.write_text("".join(json.dumps(call) + "\n" for call in calls))
    table = read_log([log], format="calls", logprobs_mode=mode)
    assert table.column("sampling_support").to_pylist() == [None, [[4, 6]]]
