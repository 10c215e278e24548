"""What a request leaves out is added to it and recorded, if the recorder is told the defaults."""

import json

import pytest

from rollout_io.cli.main import run
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.recorder_helpers import CHAT, TEXT, recording, rows

USED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1}
NAMES = ("temperature", "top_p", "top_k", "sampling_extra")


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (None, (None, None, None, None)),
        ("neutral", (1.0, 1.0, 0, None)),
        ("model", (0.6, 0.95, 20, '{"min_p":0.1}')),
    ],
)
async def test_settings_that_a_request_leaves_out_are_sent_and_recorded(tmp_path, named, expected):
    (tmp_path / "generation_config.json").write_text(json.dumps(USED))
    defaults = str(tmp_path) if named == "model" else named
    app = FakeEngine()

    async with recording(tmp_path / "ds", app, sampling_defaults=defaults) as client:
        for n, (path, body) in enumerate((("chat/completions", CHAT), ("completions", TEXT))):
            await client.post(f"/s/a/{n}/v1/{path}", json=body | {"top_k": None})
            await client.post(f"/s/a/{n}/end", json={"reward": 1.0})
        await client.post("/s/b/0/v1/completions", json=TEXT | {"temperature": 0.25})
        await client.post("/s/b/0/end", json={"reward": 1.0})
    made = [tuple(row.get(name) for name in NAMES) for row in rows(tmp_path / "ds", *NAMES)]
    rounded = [tuple(round(x, 4) if isinstance(x, float) else x for x in row) for row in made]
    assert sorted(rounded, key=str) == sorted([expected, expected, (0.25, *expected[1:])], key=str)
    assert [request.get("top_p") for request in app.requests] == [expected[1]] * 3


def test_a_directory_without_defaults_is_refused_at_the_start(tmp_path, capfd):
    given = ["record", "--upstream", "http://127.0.0.1:9", "--out", str(tmp_path / "ds")]
    assert run([*given, "--sampling-defaults", str(tmp_path)]) == 1
    assert "a model directory with a generation_config.json" in capfd.readouterr().err
