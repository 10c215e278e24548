"""Secrets in recorded calls never reach the disk, and harness and engine get them unchanged."""

import asyncio
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest

import rollout_io
from pipelines.merging.merge import merge_table, unmerge_table
from pipelines.record.recorder import Recorder
from pipelines.record.redaction import Redaction
from pipelines.record.serving import new_recorder
from pipelines.record.settings import RecordSettings
from rollout_io.cli.main import run
from rollout_io.redaction import scanner
from rollout_io.redaction.scanner import Rules
from rollout_io.retokenize.token_bytes import TokenBytes
from schemas.errors import ConfigError, InputError, MissingExtra
from tests.helpers.fake_engine import FakeEngine, event, running
from tests.helpers.recorder_helpers import outcomes, recording, rows
from tests.helpers.token_engine import TokenEngine
from tests.pipelines.record.test_exact_dialects import Chat, Messages, Responses, num_breaks

PATTERN = {"key": r"KEY-\w{12}", "word": r"password: (\w{10})"}
ASKED, CALLED, RESULT = "KEY-asked000cafe", "KEY-called00cafe", "KEY-result00cafe"
SAID, LATE = "KEY-said0000cafe", "hunter2w0rd"[:10]
SECRETS = (ASKED, CALLED, RESULT, SAID)
SCRIPT = (
    f'<think>Look.</think>I will.<tool_call>{{"name":"ls", "arguments":{{"p":"\\"{CALLED}\\""}}}}'
    "</tool_call>",
    f"<think>Hm.</think>It is {SAID}, I think.",
    "Bye.",
)


class Streamer(TokenEngine):
    """Sends one token a chunk, so that a chunk has only a part of a secret."""

    async def _chunks(self, made, send):
        (choice,) = made["choices"]
        head = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        is_chat = "message" in choice
        ids, reason = choice["token_ids"], choice["finish_reason"]
        message = choice.get("message") or {}
        said = [message.get("reasoning"), message.get("content"), *message.get("tool_calls", ())]
        if is_chat:
            deltas = [{"reasoning": c} for c in said[0] or ""]
            deltas += [{"content": c} for c in said[1] or ""]
            deltas += [{"tool_calls": [call | {"index": i}]} for i, call in enumerate(said[2:])]
        else:
            deltas = list(choice["text"])
        body = b""
        for i in range(max(len(ids), len(deltas))):
            part = {"index": 0, "token_ids": ids[i : i + 1], "finish_reason": None}
            part["logprobs"] = self._logprobs(choice["logprobs"], i, is_chat)
            delta = deltas[i] if i < len(deltas) else ({} if is_chat else "")
            part["delta" if is_chat else "text"] = delta
            top = {"prompt_token_ids": made.get("prompt_token_ids")} if i == 0 else {}
            if not is_chat and i == 0:
                part["prompt_token_ids"] = choice["prompt_token_ids"]
            body += event({"id": "x", "model": made["model"], "choices": [part], **top})
        end = {
            "index": 0,
            "finish_reason": reason,
            ("delta" if is_chat else "text"): {} if is_chat else "",
        }
        body += event({"id": "x", "model": made["model"], "choices": [end]})
        body += event({"choices": [], "usage": made["usage"]}) + b"data: [DONE]\n\n"
        await send({"type": "http.response.body", "body": body})

    def _logprobs(self, logprobs, i, is_chat):
        if is_chat:
            return {"content": logprobs["content"][i : i + 1]}
        return {name: values[i : i + 1] for name, values in logprobs.items()}


@pytest.fixture
def no_rules(monkeypatch):
    """Only the patterns are looked for, because the scanner takes a second to start."""

    class Nothing:
        def scan(self, _):
            return []

    monkeypatch.setattr(scanner, "_scanner", Nothing)


def on_disk(out, tokenizer):
    """All bytes below a directory, with the texts of Parquet files and their decoded ids."""
    texts = []
    for path in sorted(out.parent.rglob("*")):
        if path.suffix == ".parquet":
            table = pq.read_table(path)
            texts += [str(pq.read_metadata(path).metadata), json.dumps(table.to_pylist())]
            for row in rollout_io.read(path).to_pylist():
                texts.append(tokenizer.decode(row["prompt_token_ids"] + row["response_ids"]))
        elif path.is_file():
            texts.append(path.read_bytes().decode("utf-8", "replace"))
            if path.suffix != ".jsonl":
                continue
            for line in texts[-1].splitlines():
                response = json.loads(line).get("response", {})
                chunks = response if isinstance(response, list) else [response]
                choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
                for holder in (*chunks, *choices):
                    ids = [holder.get("prompt_token_ids") or [], holder.get("token_ids") or []]
                    texts.append(tokenizer.decode(ids[0] + ids[1]))
    return str(out) + "\n".join(texts).replace("\\", "")


def with_secrets(harness):
    harness.turns[0] = {"role": "user", "content": f"Look for {ASKED}."}
    return harness


def conversation(out, tokenizer, model, harness, *, stream, look):
    """Three turns of a harness that is given secrets and sends them back; what it got."""
    app, got = Streamer(tokenizer, SCRIPT), []

    async def main(url):
        settings = {"redact": True, "patterns": PATTERN, "exact_prefix": str(model)}
        async with recording(out, url, **settings) as client:
            for _ in SCRIPT:
                path = f"/s/a/0/{harness.path_of(stream)}"
                answer = await client.post(path, json=harness.body(stream))
                assert answer.status_code == 200, answer.text
                got.append(answer.text)
                harness.take(answer.text, stream)
                last = harness.turns[-1]
                harness.turns[-1] = json.loads(json.dumps(last).replace("seen", RESULT))
                look()
            ended = {"reward": 1.0, "error": f"lost {SAID}"}
            await client.post("/s/a/0/end", json=ended)
            again = await client.post("/s/a/0/end", json=ended)
            assert again.status_code == 200, again.text
            look()

    with running(app) as url:
        asyncio.run(main(url))
    return app, got


@pytest.mark.usefixtures("no_rules")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("harness", [Chat, Messages, Responses])
def test_secrets_of_a_conversation_are_never_on_disk_and_nobody_else_misses_them(
    tmp_path, tokenizer, smollm2_dir, harness, stream
):
    out = tmp_path / "ds"

    def look():
        found = on_disk(out, tokenizer)
        assert not [secret for secret in SECRETS if secret[4:] in found]

    app, got = conversation(
        out, tokenizer, smollm2_dir, with_secrets(harness()), stream=stream, look=look
    )
    look()
    sent = json.dumps([request.get("messages") for request in app.requests])
    sent += "".join(tokenizer.decode(r["prompt"]) for r in app.requests if "prompt" in r)
    assert all(secret in sent for secret in (ASKED, CALLED, RESULT, SAID))
    assert CALLED in got[0].replace("\\", "")
    found = rollout_io.read(out)
    assert run(["validate", str(out)]) == 0
    marked = 0
    for row, text in zip(found.to_pylist(), SCRIPT, strict=True):
        whole = tokenizer.encode([text], ["a"])[0]
        assert len(row["response_ids"]) == len(whole) + 1
        for i, gone in enumerate(row["redacted"]):
            assert row["loss_mask"][i] is not gone
            assert row["rollout_logprobs"][i] == (0.0 if gone else -0.5)
        marked += any(row["redacted"])
    assert marked == 2
    assert num_breaks(found.to_pylist()) == 0
    merged = merge_table(found)
    assert merged.num_rows == 1
    names = ["prompt_token_ids", "response_ids", "loss_mask", "redacted"]
    assert unmerge_table(merged).select(names).to_pylist() == found.select(names).to_pylist()
    assert outcomes(out) == {"a_0": (None, "lost [REDACTED_3]")}


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


def chat(prompt, *answers, **more):
    """A request, and a response with these choices."""
    choices = [
        {
            "index": i,
            "message": {"content": answer},
            "token_ids": ids_of(answer),
            "logprobs": {"content": [{"token": c, "logprob": -0.5} for c in answer]},
            "finish_reason": "stop",
            **more,
        }
        for i, answer in enumerate(answers)
    ]
    messages = [{"role": "user", "content": prompt}]
    return {"messages": messages}, {"prompt_token_ids": ids_of(prompt), "choices": choices}


SPOKEN = SimpleNamespace(decode=lambda ids: bytes(ids).decode())


@pytest.mark.usefixtures("no_rules")
def test_a_secret_that_is_recognised_later_is_gone_once_the_recording_is_closed(tmp_path):
    out = tmp_path / "ds"
    bad = {"choices": [{"index": 3, "message": {"content": LATE}}]}

    async def main():
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

    asyncio.run(main())
    assert "b" in (tmp_path / "ds.rejected.jsonl").read_text()
    assert LATE not in on_disk(out, SPOKEN)
    assert run(["validate", str(out)]) == 0
    found = {row["instance_id"]: row for row in rows(out, "instance_id", "prompt_token_ids")}
    assert found["a"]["prompt_token_ids"] == [*ids_of("use "), *[STAR] * 10, *ids_of(" now")]


@pytest.mark.usefixtures("no_rules")
def test_choices_of_a_call_share_their_prompt_and_lose_the_sets_of_replaced_tokens(tmp_path):
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

    async def main():
        async with recorder_of(out) as recorder:
            await call(recorder, "a/0", asked | {"n": 2}, given, agent=f"main {SAID}")
            assert not [s for s in (SAID, ASKED) if s[4:] in on_disk(out, SPOKEN)]
            await recorder.end("a/0", {"reward": 1.0})

    asyncio.run(main())
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
@pytest.mark.parametrize("is_list", [False, True])
def test_a_prompt_of_token_ids_is_redacted_in_the_request_too(tmp_path, is_list):
    out, prompt = tmp_path / "ds", ids_of(f"p {ASKED}")
    choice = {"index": 0, "text": "ok", "prompt_token_ids": prompt, "token_ids": ids_of("ok")}
    choice["logprobs"] = {"token_logprobs": [-0.5, -0.5], "tokens": ["o", "k"]}
    asked = {"prompt": [prompt] if is_list else prompt}

    async def main():
        async with recorder_of(out) as recorder:
            await call(recorder, "a/0", asked, {"choices": [choice]})
            line = json.loads(next(out.rglob("calls.jsonl")).read_text())
            clean = [112, 32, *[STAR] * 16]
            assert line["request"]["prompt"] == ([clean] if is_list else clean)
            await recorder.end("a/0", {"reward": 1.0})

    asyncio.run(main())
    assert str(ids_of(ASKED))[1:-1] not in str(rows(out, "messages", "prompt_token_ids"))


@pytest.mark.usefixtures("no_rules")
def test_pictures_are_recorded_as_they_are(tmp_path):
    url = f"data:image/png;base64,{'KEY0' * 4}{ASKED[4:]}AAA="

    async def main():
        async with recorder_of(tmp_path / "ds") as recorder:
            asked, given = chat(f"see {ASKED}", "ok")
            asked["messages"].append({"role": "user", "content": [{"image_url": {"url": url}}]})
            await call(recorder, "a/0", asked, given)
            text = next((tmp_path / "ds").rglob("calls.jsonl")).read_text()
            assert url in text
            assert ASKED not in text

    asyncio.run(main())


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
def test_a_response_without_usable_tokens_fails_its_session_and_keeps_no_secret(tmp_path, response):
    out = tmp_path / "ds"

    async def main():
        async with recorder_of(out) as recorder:
            await call(recorder, "a/0", chat(f"is {SAID}", "x")[0], response)
            assert SAID[4:] not in on_disk(out / "x", SPOKEN)
            await recorder.end("a/0", {"reward": 1.0})
            await recorder.flush()
            assert SAID[4:] not in on_disk(out, SPOKEN) + str(recorder.said)

    asyncio.run(main())
    assert outcomes(out)["a_0"][1]


@pytest.mark.usefixtures("no_rules")
def test_ids_of_another_tokenizer_are_refused_because_their_secrets_would_be_kept(
    tmp_path, smollm2_dir
):
    async def main(url):
        given = {"redact": True, "tokenizer": str(smollm2_dir), "patterns": PATTERN}
        async with recording(tmp_path / "ds", url, **given) as client:
            asked = {"model": "fake", "messages": [{"role": "user", "content": ASKED}]}
            answer = await client.post("/s/a/0/v1/chat/completions", json=asked)
            assert answer.status_code >= 400
            assert "--tokenizer DIR" in answer.text
            assert not [p for p in (tmp_path / "ds").rglob("calls.jsonl") if p.read_text()]
            named = await client.post(f"/s/{ASKED}/0/v1/chat/completions", json=asked)
            assert "the name contains a secret" in named.text

    with running(FakeEngine()) as url:
        asyncio.run(main(url))


@pytest.mark.usefixtures("no_rules")
def test_what_redaction_needs_is_refused_at_the_start(tmp_path, monkeypatch):
    def start(**settings):
        return new_recorder(RecordSettings(out=str(tmp_path), upstreams=(), **settings), print)

    with pytest.raises(ConfigError, match="no tokenizer"):
        start(redact=True)
    with pytest.raises(ConfigError, match="without --redact"):
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
def test_sessions_that_were_not_redacted_are_when_a_recorder_continues_them(tmp_path):
    out = tmp_path / "ds"

    async def main():
        async with Recorder(RecordSettings(out=str(out), upstreams=())) as recorder:
            await call(recorder, "a/0", *chat(f"p {SAID}", "yes"))
            await call(recorder, "b/0", *chat("is it there", SAID))
            await recorder.record(recorder.session_for("b/0"), {}, msgspec.Raw(b"{}"))
            assert SAID in on_disk(out, SPOKEN)
        async with recorder_of(out) as recorder:
            assert SAID[4:] not in on_disk(out / ".recording" / "x", SPOKEN)
            await call(recorder, "a/0", *chat(f"p {SAID}yesgo on", "done"))
            await recorder.end("a/0", {"reward": 1.0})

    asyncio.run(main())
    assert num_breaks(rows(out, "prompt_token_ids", "response_ids")) == 0
