import re
import time
import tracemalloc
from pathlib import Path

import httpx2
import pytest

from pipelines.record import engine_responses as streams
from pipelines.record.engine_requests import read_request
from pipelines.record.engine_responses import Answer, Events, StreamedCall
from schemas.columns import metrics_dict
from schemas.errors import RolloutError
from tests.helpers.hostile_engine import ANSWERS, hostile
from tests.helpers.recorder_helpers import TEXT, recorder_process, rows

REFUSED = {
    "gzip": "answer_encoding",
    "redirect": "engine_redirect",
    "header": "engine_down",
    "headers": "engine_down",
    "chunk extension": "engine_down",
    "switch": "answer_status",
}


def peak_mib(process):
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) >> 10


def asked(url, session, body):
    """Status and text of an answer, or of as much as came."""
    parts, status = [], 0
    try:
        with httpx2.stream(
            "POST", f"{url}/s/{session}/0/v1/completions", json=body, timeout=60
        ) as answer:
            status = answer.status_code
            for part in answer.iter_raw():
                parts = [*parts[-3:], part[-4096:]]
    except httpx2.TransportError:
        parts.append(b"BROKEN OFF")
    return status, b"".join(parts).decode(errors="replace")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bound_mib", "most_mib"), [(1, 100), pytest.param(64, 500, marks=pytest.mark.nightly)]
)
def test_no_answer_of_an_engine_makes_the_recorder_grow(tmp_path, bound_mib, most_mib):
    arguments = ["--max-answer-mb", str(bound_mib), "--max-request-mb", "1"]
    with (
        hostile() as engine,
        recorder_process(tmp_path / "ds", "--upstream", engine.url, *arguments) as (process, url),
    ):
        at_first = peak_mib(process)
        for name in ANSWERS:
            engine.answer = name
            began_s = time.monotonic()
            status, said = asked(url, name.replace(" ", "-"), TEXT | {"stream": "body" not in name})
            assert time.monotonic() - began_s < 60, name
            if name == "error":
                assert (status, said[-10:]) == (400, "BROKEN OFF")
            else:
                rule = REFUSED.get(name, "answer_size")
                assert f'"type":"{rule}"' in said, (name, status, said[-400:])
                assert "evil.example" in said or rule != "engine_redirect"
            assert peak_mib(process) - at_first < most_mib, name
            httpx2.post(f"{url}/s/{name.replace(' ', '-')}/0/end", json={"reward": 0.0})
        assert httpx2.get(f"{url}/health").json()["status"] == "ok"
    assert "answer_size" in process.said


@pytest.mark.slow
def test_a_stream_that_passes_the_bound_is_recorded_as_that(tmp_path):
    with (
        hostile() as engine,
        recorder_process(tmp_path / "ds", "--upstream", engine.url, "--max-answer-mb", "1") as (
            _,
            url,
        ),
    ):
        for answer in ("events", "body"):
            engine.answer = answer
            assert "answer_size" in asked(url, "a", TEXT | {"stream": True})[1]
        assert httpx2.get(f"{url}/s/a/0").json()["unrecorded_calls"] == 1
        httpx2.post(f"{url}/s/a/0/end", json={"reward": 1.0})
    (row,) = rows(tmp_path / "ds", "stop_reason", "response_ids", "reward", "metrics")
    assert row["stop_reason"] == "answer_size"
    assert set(row["response_ids"]) == {5}
    assert metrics_dict(row["metrics"]) == {"unrecorded_calls": 1.0}


@pytest.mark.parametrize("piece", [b"x" * 9, b"data: x\n"])
def test_a_line_or_an_event_without_an_end_is_refused_at_its_bound(piece):
    events, num_pieces = Events(1000), 1000 // len(piece)
    assert not any(events.feed(piece) for _ in range(num_pieces))
    with pytest.raises(RolloutError, match="answer_size"):
        events.feed(piece)


def test_a_stream_of_more_events_than_are_taken_is_refused(monkeypatch):
    monkeypatch.setattr(streams, "MOST_EVENTS", 3)
    call = StreamedCall(read_request("text", b'{"prompt":"a"}'), lambda _: None)
    assert [call.take(b":\n\n") for _ in range(3)] == [b":\n\n"] * 3
    with pytest.raises(RolloutError, match="answer_size"):
        call.take(b":\n\n")


LARGE = b'"' + b"x" * (6 << 20) + b'"'


@pytest.mark.parametrize(
    ("content", "is_taken"),
    [
        (b'{"choices":[{"text":' + LARGE + b',"index":0}]}', True),
        (b'{"choices":[{"token_ids":[' + b"1," * (3 << 20) + b'1]}],"prompt_token_ids":[1]}', True),
        (b'{"choices":[],"prompt_token_ids":[' + b"1," * (3 << 20) + b"1]}", True),
        (b'{"choices":[' + b"{}," * (2 << 20) + b"{}]}", False),
        (b'{"choices":[' + b"{}," * 4096 + b'{"text":' + LARGE + b"}]}", False),
        (b'{"choices":[' + b"{}," * 4095 + b'{"text":' + LARGE + b"}]}", True),
        (b'{"choices":[],' + b",".join(b'"%x":1' % i for i in range(1 << 19)) + b"}", False),
        (b'{"choices":[{' + b",".join(b'"%x":1' % i for i in range(1 << 19)) + b"}]}", False),
    ],
    ids=["text", "ids", "prompt", "choices", "a choice more", "most", "fields", "of a choice"],
)
def test_an_answer_that_decoding_would_blow_up_is_refused_before(content, is_taken):
    if is_taken:
        assert Answer(content).content == content
        return
    tracemalloc.start()
    with pytest.raises(RolloutError, match="answer_size"):
        Answer(content)
    assert tracemalloc.get_traced_memory()[1] < 3 * len(content)
    tracemalloc.stop()


@pytest.mark.slow
def test_a_list_of_models_is_bounded_too(tmp_path):
    with hostile() as engine:
        options = ["--upstream", engine.url, "--served-model-name", "m", "--max-answer-mb", "1"]
        with recorder_process(tmp_path / "ds", *options) as (_, url):
            for engine.answer in ("body", "gzip", "redirect", "header"):
                for path in ("v1/models", "v1/models/m"):
                    said = httpx2.get(f"{url}/{path}", timeout=60)
                    assert said.status_code == 502, said.text
                    rule = REFUSED.get(engine.answer, "answer_size")
                    assert said.json()["error"]["type"] == rule, engine.answer


@pytest.mark.parametrize(
    ("body", "num_choices"),
    [
        (b'{"prompt":[' + b"1," * (3 << 20) + b"1]}", 1),
        (b'{"prompt":[[1],[2]],"n":2}', 4),
        (b'{"prompt":[ "a","b" , "c"]}', 3),
        (b'{"prompt":' + LARGE + b"}", 1),
        (b'{"prompt":[' + b'"",' * (2 << 20) + b'""]}', None),
        (b'{"prompt":"",' + b",".join(b'"%x":1' % i for i in range(1 << 19)) + b"}", None),
    ],
    ids=["ids", "lists", "texts", "text", "prompts", "fields"],
)
def test_a_request_that_decoding_would_blow_up_is_refused_before(body, num_choices):
    tracemalloc.start()
    if num_choices is None:
        with pytest.raises(RolloutError, match="request_size"):
            read_request("text", body)
    else:
        assert read_request("text", body).num_choices == num_choices
    assert tracemalloc.get_traced_memory()[1] < 4 * len(body) + (1 << 20)
    tracemalloc.stop()
