"""Errors quote contents: secrets are replaced before they are cut."""

import json

import pytest

from pipelines.http_server import JSON
from rollout_io.conversion.rejections import reasons_of
from schemas.errors import InputError, cleaning, fragment, quoted
from tests.helpers.recorder_helpers import outcomes, recording
from tests.helpers.redaction_helpers import PATTERN, SAID, on_disk
from tests.pipelines.record.test_redacted_calls import SPOKEN, call, chat, recorder_of

PART = SAID[:8]
"""A part that no pattern finds, and that nobody should see."""


def test_contents_are_cleaned_before_they_are_cut_and_only_in_a_block():
    text, error = "a" * 34 + SAID + "b" * 50, InputError("rule", "x", "c" * 60 + SAID)
    assert PART[:6] in quoted(text)
    assert fragment("part") == "'part'"
    assert SAID[:5] in reasons_of([error])
    with cleaning(lambda content: content.replace(SAID, "[gone]")):
        assert quoted(text) == repr("a" * 34 + "[gone]..." + "b" * 15)
        assert SAID[:5] not in reasons_of([error])
        assert fragment("part") == "'...'"
    assert PART[:6] in quoted(text)


@pytest.mark.usefixtures("no_rules")
async def test_a_response_of_another_text_fails_its_session_and_keeps_no_part_of_a_secret(tmp_path):
    out, answer = tmp_path / "ds", "x" * 30 + f" {SAID}" + " y" * 30
    asked, given = chat("p", answer)
    given["choices"][0]["message"]["content"] = f"another text that is longer, {SAID}, than it"

    async with recorder_of(out) as recorder:
        await call(recorder, "a/0", asked, given)
        with recorder.cleaning():
            assert await recorder.read(recorder.session_for("a/0"), _raw(given)) is None
        assert PART not in on_disk(out, SPOKEN) + str(recorder.said)
        assert "REDACTED_0" in str(recorder.said)
        await recorder.end("a/0", {"reward": 1.0})
    assert PART not in on_disk(out, SPOKEN)
    assert "belong to the text" in outcomes(out)["a_0"][1]


def _raw(value):
    return json.dumps(value).encode()


def refusing(status, headers, body):
    """An engine that answers each call like this."""

    async def app(scope, _, send):
        if scope["type"] == "lifespan":
            return
        head = {"type": "http.response.start", "status": status, "headers": headers}
        await send(head)
        await send({"type": "http.response.body", "body": body})

    return app


_LONG = "w " * 240
_CUT = f"{_LONG}at {SAID} end"
_REFUSALS = {
    "text": (502, [], _CUT.encode()),
    "json": (400, [(b"content-type", JSON.encode())], _raw({"error": {"message": _CUT}})),
    "redirect": (307, [(b"location", f"http://x/{'p/' * 90}{SAID}".encode())], b""),
    "encoding": (200, [(b"content-encoding", f"{'g' * 20}-{SAID}".encode())], b"{}"),
}


@pytest.mark.slow
@pytest.mark.usefixtures("no_rules")
@pytest.mark.parametrize("path", ["chat/completions", "messages"])
@pytest.mark.parametrize("refusal", _REFUSALS)
async def test_an_error_of_an_engine_is_kept_without_a_part_of_a_secret(
    tmp_path, smollm2_dir, refusal, path
):
    out = tmp_path / "ds"

    given = {"redact": True, "tokenizer": str(smollm2_dir), "patterns": PATTERN}
    async with recording(out, refusing(*_REFUSALS[refusal]), **given) as client:
        asked = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
        answer = await client.post(f"/s/a/0/v1/{path}", json=asked)
        assert answer.status_code >= 400
        await client.post("/s/a/0/end", json={"reward": 1.0})
        assert PART not in str(client.said)
    assert "the last answer was an error" in outcomes(out)["a_0"][1]
    assert "[REDACTED" in outcomes(out)["a_0"][1]
    assert PART not in on_disk(out, SPOKEN)
