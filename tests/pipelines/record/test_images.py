"""The pictures of recorded calls are stored beside the dataset."""

import base64
import hashlib
import json

import pytest

import rollout_io
from rollout_io.retokenize import load_tokenizer
from tests.helpers.fake_engine import FakeAnswer, FakeEngine
from tests.helpers.picture_models import png, save_family
from tests.helpers.recorder_helpers import recording
from tests.rollout_io.conversion.test_picture_spans import engine_ids

PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 20
URL = f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"


async def test_a_recorded_session_with_an_image_is_a_row_that_refers_to_it(tmp_path):
    shown = [{"type": "text", "text": "See."}, {"type": "image_url", "image_url": {"url": URL}}]

    async with recording(tmp_path / "ds", FakeEngine()) as client:
        body = {"messages": [{"role": "user", "content": shown}], "model": "m"}
        (await client.post("/s/a/0/v1/chat/completions", json=body)).raise_for_status()
        (await client.post("/s/a/0/end", json={"reward": 1.0})).raise_for_status()
    row = rollout_io.read(tmp_path / "ds").to_pylist()[0]
    blob = f"sha256:{hashlib.sha256(PICTURE).hexdigest()}"
    assert row["pictures"] == [{"sha256": blob, "start": None, "length": None}]
    assert json.loads(row["messages"])[0]["content"][1]["blob"] == blob
    (file,) = (tmp_path / "ds.blobs").iterdir()
    assert file.read_bytes() == PICTURE
    assert rollout_io.check(tmp_path / "ds").is_empty()


SHOWN = [png(0), png(1, 56, 56)]
DATA = [base64.b64encode(content).decode() for content in SHOWN]
URLS = [f"data:image/png;base64,{data}" for data in DATA]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_family(tmp_path_factory.mktemp("qwen") / "model")


class SeeingEngine(FakeEngine):
    """An engine whose prompts have the tokens that its processor gives for the pictures.

    Attributes:
        lost: Number of tokens that are missing at the first picture.
    """

    def __init__(self, model, lost=0):
        super().__init__()
        self.model, self.lost = model, lost

    def answer_to(self, body, _):
        return SeeingAnswer(self, body)


class SeeingAnswer(FakeAnswer):
    def __init__(self, engine, body):
        super().__init__(body, "", True, 6)
        self.tokenizer = load_tokenizer(engine.model)
        parts = [part for message in body["messages"] for part in message["content"]]
        urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        contents = [base64.b64decode(url.partition(",")[2]) for url in urls]
        self.prompt = engine_ids(engine.model, *contents)
        at = self.prompt.index(self.tokenizer.placeholder_id)
        del self.prompt[at : at + engine.lost]

    def tokens(self, text):
        return self.tokenizer.encode([text], ["answer"])[0]


def _chat():
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in URLS]
    content = [{"type": "text", "text": "Look: "}, *parts]
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]}


def _responses():
    parts = [{"type": "input_image", "image_url": url} for url in URLS]
    content = [{"type": "input_text", "text": "Look: "}, *parts]
    return "/v1/responses", {"input": [{"role": "user", "content": content}]}


def _anthropic():
    sources = [{"type": "base64", "media_type": "image/png", "data": data} for data in DATA]
    content = [
        {"type": "text", "text": "Look: "},
        *({"type": "image", "source": s} for s in sources),
    ]
    return "/v1/messages", {"max_tokens": 8, "messages": [{"role": "user", "content": content}]}


def _gemini():
    parts = [{"inlineData": {"mimeType": "image/png", "data": data}} for data in DATA]
    contents = [{"role": "user", "parts": [{"text": "Look: "}, *parts]}]
    return "/v1beta/models/m:generateContent", {"contents": contents}


@pytest.mark.parametrize("asked", [_chat, _responses, _anthropic, _gemini])
async def test_pictures_of_each_api_have_the_tokens_of_the_processor(tmp_path, model, asked):
    path, body = asked()

    async with recording(tmp_path / "ds", SeeingEngine(model), tokenizer=str(model)) as client:
        body.setdefault("model", "m")
        (await client.post(f"/s/a/0{path}", json=body)).raise_for_status()
        (await client.post("/s/a/0/end", json={"reward": 1.0})).raise_for_status()
    (row,) = rollout_io.read(tmp_path / "ds").to_pylist()
    assert row.get("error") is None
    pad = load_tokenizer(model).placeholder_id
    for entry, content in zip(row["pictures"], SHOWN, strict=True):
        assert entry["sha256"] == f"sha256:{hashlib.sha256(content).hexdigest()}"
        span = row["prompt_token_ids"][entry["start"] :][: entry["length"]]
        assert set(span) == {pad}
        assert row["prompt_token_ids"][entry["start"] + entry["length"]] != pad
    assert rollout_io.check(tmp_path / "ds").is_empty()


async def test_a_recorded_call_with_other_tokens_than_the_processor_gives_fails_its_session(
    tmp_path, model
):
    path, body = _chat()

    async with recording(
        tmp_path / "ds", SeeingEngine(model, lost=1), tokenizer=str(model)
    ) as client:
        (await client.post(f"/s/a/0{path}", json=body | {"model": "m"})).raise_for_status()
        (await client.post("/s/a/0/end", json={"reward": 1.0})).raise_for_status()
    (row,) = rollout_io.read(tmp_path / "ds").to_pylist()
    assert "picture_tokens" in row["error"]
    (line,) = (tmp_path / "ds.rejected.jsonl").read_text().splitlines()
    assert json.loads(line)["rule"] == "picture_tokens"
