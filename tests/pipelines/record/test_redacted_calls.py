"""Calls of an engine whose tokens are bytes, and what a recorder with --redact writes of them."""

import asyncio
import json
from contextlib import asynccontextmanager
from itertools import pairwise
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rollout_io
from pipelines.record.recorder import Recorder
from pipelines.record.redaction import Redaction
from pipelines.record.serving import new_recorder
from pipelines.record.settings import RecordSettings
from rollout_io.cli.main import run
from rollout_io.redaction import scanner
from rollout_io.redaction.scanner import Rules
from rollout_io.retokenize.token_bytes import TokenBytes
from schemas.errors import ConfigError, InputError, MissingExtra
from tests.helpers.examples import examples
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.recorder_helpers import outcomes, recording, rows
from tests.helpers.redaction_helpers import ASKED, LATE, PATTERN, SAID, on_disk
from tests.pipelines.record.test_exact_dialects import num_breaks

BYTES = TokenBytes("bytes", np.arange(256, dtype=np.uint8), np.arange(257))
STAR = ord("*")


def ids_of(text):
    """One token a byte."""
    return list(text.encode())


@asynccontextmanager
async def recorder_of(out, **settings):
    """A recorder of an engine whose tokens are bytes."""
    given = RecordSettings(out=str(out), upstreams=(), redact=True, flush_s=0.05, **settings)
    redaction = Redaction(Rules.of(PATTERN), BYTES, given.logprobs_mode)
    said = []
    async with Recorder(given, tell=said.append, redaction=redaction) as recorder:
        recorder.said = said
        yield recorder


async def call(recorder, name, request, response, **about):
    fields = {n: msgspec.Raw(json.dumps(v).encode()) for n, v in request.items()}
    raw = msgspec.Raw(json.dumps(response).encode())
    about = {"time": recorder.now_s()} | about
    await recorder.record(recorder.session_for(name), fields, raw, **about)


def shown(byte):
    """A token, decoded by itself."""
    return bytes([byte]).decode("utf-8", "replace")


def chat(prompt, *answers, **more):
    """A request, and a response with these choices."""
    choices = [
        {
            "index": i,
            "message": {"content": answer},
            "token_ids": ids_of(answer),
            "logprobs": {"content": [{"token": shown(i), "logprob": -0.5} for i in ids_of(answer)]},
            "finish_reason": "stop",
            **more,
        }
        for i, answer in enumerate(answers)
    ]
    messages = [{"role": "user", "content": prompt}]
    return {"messages": messages}, {"prompt_token_ids": ids_of(prompt), "choices": choices}


SPOKEN = SimpleNamespace(decode=lambda ids: bytes(ids).decode())


@pytest.mark.usefixtures("no_rules")
async def test_a_secret_that_is_recognised_later_is_gone_once_the_recording_is_closed(tmp_path):
    out = tmp_path / "ds"
    bad = {"choices": [{"index": 3, "message": {"content": LATE}}]}

    async with recorder_of(out) as recorder:
        await call(recorder, "a/0", *chat(f"use {LATE} now", "yes"))
        await call(recorder, "b/0", chat(f"also {LATE} there", "yes")[0], bad)
        for name in ("a/0", "b/0"):
            await recorder.end(name, {"reward": 1.0})
        await recorder.flush()
        assert LATE in on_disk(out, SPOKEN)
        await call(recorder, "c/0", *chat(f"password: {LATE}", "ok"))
        await call(recorder, "d/0", *chat("again", f"it is {LATE}"))
        lines = next(out.rglob("calls.jsonl")).read_text().splitlines()
        assert [LATE in line for line in lines] == [True, True, False, False]
        await recorder.end("c/0", {"reward": 1.0})
    assert "b" in (tmp_path / "ds.rejected.jsonl").read_text()
    assert LATE not in on_disk(out, SPOKEN)
    assert run(["validate", str(out)]) == 0
    found = {row["instance_id"]: row for row in rows(out, "instance_id", "prompt_token_ids")}
    assert found["a"]["prompt_token_ids"] == [*ids_of("use "), *[STAR] * 10, *ids_of(" now")]


@pytest.mark.usefixtures("no_rules")
async def test_choices_of_a_call_share_their_prompt_and_lose_the_sets_of_replaced_tokens(tmp_path):
    out, answer = tmp_path / "ds", f"x {SAID}"
    sets = [[ord(c), ord("q")] for c in answer]
    asked, given = chat(f"p {ASKED}", answer, "y" * len(answer), sampling_support=sets)
    for choice in given["choices"]:
        routes = [[[5, 7]]] * (len(given["prompt_token_ids"]) + len(answer))
        choice["routed_experts"] = routes
        choice["sampling_support"] = [[i, ord("q")] for i in choice["token_ids"]]
        for entry in choice["logprobs"]["content"]:
            entry["top_logprobs"] = [{"token": SAID, "logprob": -0.1}]
    given["choices"][0]["provider"] = SAID
    given["prompt_logprobs"] = [SAID]

    async with recorder_of(out) as recorder:
        await call(recorder, "a/0", asked | {"n": 2}, given, agent=f"main {SAID}")
        assert not [s for s in (SAID, ASKED) if s[4:] in on_disk(out, SPOKEN)]
        await recorder.end("a/0", {"reward": 1.0})
    assert run(["validate", str(out)]) == 0
    first, second = rollout_io.read(out).to_pylist()
    assert first["prompt_token_ids"] == second["prompt_token_ids"] == [112, 32, *[STAR] * 16]
    assert first["response_ids"] == [120, 32, *[STAR] * 16]
    assert first["redacted"] == [False, False, *[True] * 16]
    assert first["sampling_support"] == [*sets[:2], *[[]] * 16]
    assert [r[0] for r in first["rollout_expert_indices"]] == [
        *[[5, 7]] * 2,
        *[[0, 1]] * 16,
        *[[5, 7]] * 2,
        *[[0, 1]] * 16,
    ]
    assert first["agent"] == "main [REDACTED_1]"
    assert not any(second["redacted"])


@pytest.mark.usefixtures("no_rules")
@settings(
    deadline=None,
    max_examples=examples(30),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(st.sampled_from(["a", '"', "\\", "\n", " ", "é", SAID, LATE]), max_size=8), st.data()
)
def test_any_cut_of_a_stream_is_recorded_like_the_whole_answer(parts, data):
    prompt, answer = f"password: {LATE} ", "".join(parts) or "x"
    asked, whole = chat(prompt, answer)
    ids = ids_of(answer)
    places = st.sets(st.integers(1, max(1, len(answer) - 1)), max_size=6)
    texts = cut(answer, data.draw(places))
    pieces = cut(ids, data.draw(places))
    no_ids = {"token_ids": [], "logprobs": {"content": []}}
    chunks = [{"choices": [{"index": 0, "delta": {"content": t}, **no_ids}]} for t in texts]
    chunks[0]["prompt_token_ids"] = ids_of(prompt)
    for piece in pieces:
        content = [{"logprob": -0.5}] * len(piece)
        choice = {"index": 0, "delta": {}, "token_ids": piece, "logprobs": {"content": content}}
        chunks.append({"choices": [choice]})
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    made = [recorded(asked, response) for response in (whole, chunks)]
    assert made[0]["response"]["choices"] == made[1]["response"]["choices"]
    (choice,) = made[0]["response"]["choices"]
    gone = np.zeros(len(ids), bool)
    for begin, end in choice["redacted"]:
        gone[begin:end] = True
    expected = answer.encode().replace(SAID.encode(), b"*" * 16).replace(LATE.encode(), b"*" * 10)
    assert bytes(choice["token_ids"]) == expected
    assert gone.sum() == 16 * parts.count(SAID) + 10 * parts.count(LATE)
    assert [e["logprob"] for e in choice["logprobs"]["content"]] == np.where(gone, 0, -0.5).tolist()
    assert not [s for s in (SAID, LATE) if s in json.dumps(made).replace("\\", "")]


def cut(values, places):
    bounds = [0, *sorted(p for p in places if p < len(values)), len(values)]
    return [values[a:b] for a, b in pairwise(bounds)]


def recorded(asked, response):
    """What the journal would have of a call."""
    redaction = Redaction(Rules.of(PATTERN), BYTES)
    raw = {name: msgspec.Raw(json.dumps(value).encode()) for name, value in asked.items()}
    record = {"session": "a/0", "request": raw}
    record["response"] = msgspec.Raw(json.dumps(response).encode())
    return json.loads(msgspec.json.encode(asyncio.run(redaction.call(record))))


@pytest.mark.usefixtures("no_rules")
@pytest.mark.parametrize("is_list", [False, True])
async def test_a_prompt_of_token_ids_is_redacted_in_the_request_too(tmp_path, is_list):
    out, prompt = tmp_path / "ds", ids_of(f"p {ASKED}")
    choice = {"index": 0, "text": "ok", "prompt_token_ids": prompt, "token_ids": ids_of("ok")}
    choice["logprobs"] = {"token_logprobs": [-0.5, -0.5], "tokens": ["o", "k"]}
    asked = {"prompt": [prompt] if is_list else prompt}

    async with recorder_of(out) as recorder:
        await call(recorder, "a/0", asked, {"choices": [choice]})
        line = json.loads(next(out.rglob("calls.jsonl")).read_text())
        clean = [112, 32, *[STAR] * 16]
        assert line["request"]["prompt"] == ([clean] if is_list else clean)
        await recorder.end("a/0", {"reward": 1.0})
    assert str(ids_of(ASKED))[1:-1] not in str(rows(out, "messages", "prompt_token_ids"))


@pytest.mark.usefixtures("no_rules")
@pytest.mark.parametrize("num", [4, 8, 12])
async def test_both_parts_of_a_secret_that_an_answer_completes_are_replaced_in_texts(tmp_path, num):
    out, prompt, text = tmp_path / "ds", f"It is {ASKED[:num]}", f"{ASKED[num:]} ok"
    choice = {"index": 0, "text": text, "prompt_token_ids": ids_of(prompt)}
    choice |= {"token_ids": ids_of(text), "logprobs": {"token_logprobs": [-0.5] * len(text)}}

    async with recorder_of(out) as recorder:
        await call(recorder, "a/0", {"prompt": prompt}, {"choices": [choice]})
        await call(recorder, "a/0", *chat(f"part {ASKED[:num]} again", "yes"))
        await recorder.end("a/0", {"reward": 1.0})
    written = on_disk(out, SPOKEN)
    parts = ASKED[:num], ASKED[num:]
    assert [part in written for part in parts] == [len(part) < 8 for part in parts]
    assert rows(out, "redacted")[0]["redacted"] == [True] * (16 - num) + [False] * 3


@pytest.mark.usefixtures("no_rules")
async def test_pictures_are_recorded_as_they_are(tmp_path):
    url = f"data:image/png;base64,{'KEY0' * 4}{ASKED[4:]}AAA="

    async with recorder_of(tmp_path / "ds") as recorder:
        asked, given = chat(f"see {ASKED}", "ok")
        asked["messages"].append({"role": "user", "content": [{"image_url": {"url": url}}]})
        await call(recorder, "a/0", asked, given)
        text = next((tmp_path / "ds").rglob("calls.jsonl")).read_text()
        assert url in text
        assert ASKED not in text


@pytest.mark.usefixtures("no_rules")
@pytest.mark.parametrize(
    "response",
    [
        {"error": {"message": f"bad {SAID}"}},
        [{"choices": [{"index": 0, "delta": {"content": SAID}}]}, {"error": SAID}],
        {"choices": [{"index": 0, "message": {"content": SAID}}]},
        {"choices": [{"index": 0, "message": {"content": "x"}, "token_ids": SAID}]},
        {"choices": [{"index": 0, "finish_reason": SAID, "token_ids": ids_of(SAID)}]},
        SAID,
        None,
    ],
)
async def test_a_response_without_usable_tokens_fails_its_session_and_keeps_no_secret(
    tmp_path, response
):
    out = tmp_path / "ds"

    async with recorder_of(out) as recorder:
        await call(recorder, "a/0", chat(f"is {SAID}", "x")[0], response)
        assert SAID[4:] not in on_disk(out / "x", SPOKEN)
        await recorder.end("a/0", {"reward": 1.0})
        await recorder.flush()
        assert SAID[4:] not in on_disk(out, SPOKEN) + str(recorder.said)
    assert outcomes(out)["a_0"][1]


@pytest.mark.usefixtures("no_rules")
async def test_ids_of_another_tokenizer_are_refused_because_their_secrets_would_be_kept(
    tmp_path, smollm2_dir
):
    given = {"redact": True, "tokenizer": str(smollm2_dir), "patterns": PATTERN}
    async with recording(tmp_path / "ds", FakeEngine(), **given) as client:
        asked = {"model": "fake", "messages": [{"role": "user", "content": ASKED}]}
        answer = await client.post("/s/a/0/v1/chat/completions", json=asked)
        assert answer.status_code >= 400
        assert "--tokenizer DIR" in answer.text
        assert not [p for p in (tmp_path / "ds").rglob("calls.jsonl") if p.read_text()]
        named = await client.post(f"/s/{ASKED}/0/v1/chat/completions", json=asked)
        assert "the name contains a secret" in named.text


@pytest.mark.usefixtures("no_rules")
def test_what_redaction_needs_is_refused_at_the_start(tmp_path, monkeypatch):
    def start(**settings):
        return new_recorder(RecordSettings(out=str(tmp_path), upstreams=(), **settings), print)

    with pytest.raises(ConfigError, match="no tokenizer"):
        start(redact=True)
    with pytest.raises(ConfigError, match="need --redact"):
        start(patterns=PATTERN)
    with pytest.raises(ConfigError, match="pattern bad"):
        start(redact=True, tokenizer=str(tmp_path), patterns={"bad": "("})
    with pytest.raises(InputError, match=str(tmp_path)):
        start(redact=True, tokenizer=str(tmp_path))

    def missing():
        raise MissingExtra("extra_installed", "redact", "no package kingfisher_sdk")

    monkeypatch.setattr(scanner, "_scanner", missing)
    with pytest.raises(MissingExtra, match="kingfisher"):
        start(redact=True, tokenizer=str(tmp_path))


@pytest.mark.usefixtures("no_rules")
async def test_sessions_that_were_not_redacted_are_when_a_recorder_continues_them(tmp_path):
    out = tmp_path / "ds"

    async with Recorder(RecordSettings(out=str(out), upstreams=())) as recorder:
        await call(recorder, "a/0", *chat(f"p {SAID}", "yes"))
        await call(recorder, "b/0", *chat("is it there", SAID))
        await recorder.record(recorder.session_for("b/0"), {}, msgspec.Raw(b"{}"))
        assert SAID in on_disk(out, SPOKEN)
    async with recorder_of(out) as recorder:
        assert SAID[4:] not in on_disk(out / ".recording" / "x", SPOKEN)
        await call(recorder, "a/0", *chat(f"p {SAID}yesgo on", "done"))
        await recorder.end("a/0", {"reward": 1.0})
    assert num_breaks(rows(out, "prompt_token_ids", "response_ids")) == 0


@pytest.mark.usefixtures("no_rules")
async def test_a_call_that_cannot_be_redacted_is_not_written(tmp_path, monkeypatch):
    def fails(*_):
        raise ValueError(SAID)

    async with recorder_of(tmp_path / "ds") as recorder:
        monkeypatch.setattr(Redaction, "_clean", fails)
        monkeypatch.setattr(recorder, "_check_name", lambda _: None)
        with pytest.raises(InputError, match="cannot be redacted") as caught:
            await call(recorder, "a/0", *chat("hi", "x"))
        assert SAID not in str(caught.value)
        assert not list((tmp_path / "ds").rglob("calls.jsonl"))
        monkeypatch.undo()
