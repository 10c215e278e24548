"""Names of sessions are the same in all files of a recorder that redacts."""

import msgspec
import pytest

from pipelines.record.recorder import Recorder
from pipelines.record.settings import RecordSettings
from rollout_io.cli.main import run
from tests.helpers.recorder_helpers import outcomes, rows
from tests.helpers.redaction_helpers import LATE, SAID, on_disk
from tests.pipelines.record.test_redacted_calls import SPOKEN, call, chat, recorder_of


async def stopped():
    """Write no shard, like a recorder that was killed."""


@pytest.mark.usefixtures("no_rules")
async def test_a_restart_keeps_names_and_outcomes_of_sessions_and_says_that_a_name_has_a_secret(
    tmp_path,
):
    out, name = tmp_path / "ds", f"of-{SAID}/0"

    async with Recorder(RecordSettings(out=str(out), upstreams=())) as recorder:
        await call(recorder, name, *chat(f"p {SAID}", "yes"))
        await call(recorder, "bad/0", *chat(f"p {SAID}", "yes"))
        await recorder.record(recorder.session_for("bad/0"), {}, msgspec.Raw(b"{}"))
        await recorder.end("bad/0", {"reward": 1.0, "error": f"saw {SAID}"})
        recorder.flush = stopped
    async with recorder_of(out) as recorder:
        assert [said for said in recorder.said if "some from before contain a secret" in said]
        assert SAID not in str(recorder.said)
        await recorder.end(name, {"reward": 1.0, "error": f"lost {SAID}"})
    assert outcomes(out) == {
        f"of-{SAID}_0": (None, "lost [REDACTED_0]"),
        "bad_0": (None, "saw [REDACTED_0]"),
    }


@pytest.mark.usefixtures("no_rules")
async def test_names_that_a_later_call_shows_to_be_secrets_are_not_mixed_up(tmp_path):
    out, words = tmp_path / "ds", (LATE, LATE[::-1])

    for word in words:
        async with recorder_of(out) as recorder:
            await call(recorder, f"{word}/0", *chat("hello", f"it is {word}"))
            await recorder.record(recorder.session_for(f"{word}/1"), {}, msgspec.Raw(b"{}"))
            await recorder.end(f"{word}/0", {"reward": 1.0})
            await recorder.end(f"{word}/1", {"reward": 0.5, "error": f"not {word}"})
            await recorder.flush()
            await call(recorder, f"o-{word[:3]}/0", *chat(f"password: {word}", "ok"))
            await recorder.end(f"o-{word[:3]}/0", {"reward": 1.0})
            await recorder.end(f"{word}/0", {"reward": 1.0})
    names = {word[:3]: f"{word}_0" for word in words}
    assert names.items() <= {i[:3]: i for i in outcomes(out) if i.endswith("_0")}.items()
    assert run(["validate", str(out)]) == 0
    rejected = (tmp_path / "ds.rejected.jsonl").read_text()
    assert [f'\\"session\\":\\"{word}/1\\"' in rejected for word in words] == [True, True]
    assert {row["instance_id"] for row in rows(out, "instance_id")} >= set(words)
    said = on_disk(out, SPOKEN)
    assert not [word for word in words if f"it is {word}" in said or f"not {word}" in said]
