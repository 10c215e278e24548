"""The pictures of recorded calls are stored beside the dataset."""

import asyncio
import base64
import hashlib
import json

import rollout_io
from tests.helpers.fake_engine import FakeEngine, running
from tests.helpers.recorder_helpers import recording

PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 20
URL = f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"


def test_a_recorded_session_with_an_image_is_a_row_that_refers_to_it(tmp_path):
    shown = [{"type": "text", "text": "See."}, {"type": "image_url", "image_url": {"url": URL}}]

    async def main(url):
        async with recording(tmp_path / "ds", url) as client:
            body = {"messages": [{"role": "user", "content": shown}], "model": "m"}
            (await client.post("/s/a/0/v1/chat/completions", json=body)).raise_for_status()
            (await client.post("/s/a/0/end", json={"reward": 1.0})).raise_for_status()

    with running(FakeEngine()) as url:
        asyncio.run(main(url))
    row = rollout_io.read(tmp_path / "ds").to_pylist()[0]
    blob = f"sha256:{hashlib.sha256(PICTURE).hexdigest()}"
    assert row["pictures"] == [{"sha256": blob, "start": None, "length": None}]
    assert json.loads(row["messages"])[0]["content"][1]["blob"] == blob
    (file,) = (tmp_path / "ds.blobs").iterdir()
    assert file.read_bytes() == PICTURE
    assert rollout_io.check(tmp_path / "ds").is_empty()
