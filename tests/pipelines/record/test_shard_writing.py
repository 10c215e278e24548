"""What keeps shards from being written ends with its cause, and repeated outcomes change nothing."""

import asyncio
import errno

import pytest

from pipelines.record import shards
from schemas.errors import RolloutError
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.recorder_helpers import TEXT, outcomes, recording


def no_room(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def broken(*_):
    raise KeyError("x")


async def until(client, path, is_so):
    """Ask until the answer is so; the answer."""
    async with asyncio.timeout(20):
        while not is_so(answer := (await client.get(path)).json()):
            await asyncio.sleep(0.01)
    return answer


def make_unusable(out):
    """Damage the first call of a session without changing its length."""
    (calls,) = out.glob(".recording/0*/calls.jsonl")
    text = calls.read_text()
    assert '"token_ids"' in text
    calls.write_text(text.replace('"token_ids"', '"tokem_ids"', 1))


async def sampled(client, *sessions):
    for name in sessions:
        await client.post(f"/s/{name}/v1/completions", json=TEXT)


async def end(client, name, outcome, status=200):
    answer = await client.post(f"/s/{name}/end", json=outcome)
    assert answer.status_code == status, (outcome, answer.text)
    return answer.json()


@pytest.mark.slow
@pytest.mark.parametrize("failing", [no_room, broken], ids=["full disk", "any exception"])
@pytest.mark.parametrize(
    "part",
    [(shards.rejections, "lines"), (shards.RolloutWriter, "write")],
    ids=["rejected records", "the shard"],
)
async def test_shards_are_written_once_there_is_room_again_and_health_says_what_is_wrong(
    tmp_path, part, failing
):
    async with recording(tmp_path / "ds", FakeEngine()) as client:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*part, failing)
            await sampled(client, "a/0", "a/1")
            make_unusable(tmp_path / "ds")
            for name in ("a/0", "a/1"):
                await end(client, name, {"reward": 1.0})
            health = await until(client, "/health", lambda health: health["status"] != "ok")
            assert (await client.get("/health")).status_code == 507
            assert health["status"] == "not writing shards"
            cause = "no space left" if failing is no_room else "keyerror"
            assert cause in health["problem"].lower()
        await until(client, "/health", lambda health: health["status"] == "ok")
        await until(client, "/s/a/1", lambda session: session["state"] == "written")
    outcome = outcomes(tmp_path / "ds")
    assert outcome["a_1"] == (1.0, None)
    assert outcome["a_0"][1] is not None
    assert len((tmp_path / "ds.rejected.jsonl").read_text().splitlines()) == 1


ENDS = [
    {"reward": 0.25},
    {"reward": 1.0, "metrics": {"num_tests": 3.0}},
    {"error": "timeout: the tests hang"},
    {},
]


REPEATED = ("session", "reward", "error")


async def check_repeated(client, name, outcome, first):
    """The same outcome is answered as before, and another one is refused."""
    for _ in range(2):
        repeated = await end(client, name, outcome)
        assert [repeated[n] for n in REPEATED] == [first[n] for n in REPEATED]
    for other in ({"reward": 0.5}, outcome | {"error": "another"}, outcome | {"metrics": {"x": 1}}):
        await end(client, name, other, 409)


@pytest.mark.slow
@pytest.mark.parametrize("flush_s", [0.02, 60.0], ids=["in a shard", "in the journal"])
@pytest.mark.parametrize("again", [False, True], ids=["running", "restarted"])
async def test_a_repeated_outcome_is_accepted_and_another_one_refused(tmp_path, flush_s, again):
    out, app = tmp_path / "ds", FakeEngine()
    first, state = {}, "written" if flush_s < 1 else "ended"
    async with recording(out, app, flush_s=flush_s) as client:
        for i, outcome in enumerate(ENDS):
            await sampled(client, f"a/{i}")
            first[f"a/{i}"] = await end(client, f"a/{i}", outcome)
            assert first[f"a/{i}"]["reward"] == outcome.get("reward")
            await until(client, f"/s/a/{i}", lambda session: session["state"] == state)
            if not again:
                await check_repeated(client, f"a/{i}", outcome, first[f"a/{i}"])
        journal = {path: path.read_bytes() for path in out.glob(".recording/0*/*")}
    if not again:
        return
    if flush_s > 1:  # as if it had been killed before its end
        for shard in out.glob("part-*"):
            shard.unlink()
        restore(journal)
    async with recording(out, app, flush_s=60.0) as client:
        for i, outcome in enumerate(ENDS):
            await check_repeated(client, f"a/{i}", outcome, first[f"a/{i}"])


def restore(contents):
    for path, content in contents.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)


@pytest.mark.parametrize("cut", [0, 7, 100_000], ids=["whole", "torn", "none"])
async def test_a_kill_between_rejected_calls_and_their_shard_leaves_each_line_once(
    tmp_path, cut, monkeypatch
):
    """The files at the moment of the kill are those at the moment when the shard is published."""
    out, rejected = tmp_path / "ds", tmp_path / "ds.rejected.jsonl"
    at_kill, app, close = {}, FakeEngine(), shards.RolloutWriter.close

    def closed(writer):
        files = [*out.glob(".recording/0*/*"), rejected]
        at_kill.update({path: path.read_bytes() for path in files if not at_kill.get(path)})
        close(writer)

    monkeypatch.setattr(shards.RolloutWriter, "close", closed)
    async with recording(out, app, flush_s=60) as client:
        await sampled(client, "a/0", "a/1", "a/2")
        for name in ("a/0", "a/1"):
            await end(client, name, {"reward": 1.0})
        make_unusable(out)
        await client.recorder.flush()
    written = outcomes(out)
    content = rejected.read_bytes()
    for path in (*out.glob("part-*"), *out.glob(".recording/0*/written.jsonl")):
        path.unlink()
    restore(at_kill)
    rejected.write_bytes(content[: max(len(content) - cut, 0)])
    async with recording(out, app, flush_s=60) as client:
        await client.recorder.flush()
    assert outcomes(out) == written
    assert rejected.read_bytes() == content
    assert content.count(b"\n") == 1


@pytest.mark.parametrize("kind", ["a link", "a directory", "notes"])
async def test_rejected_calls_are_not_written_into_what_is_not_their_file(tmp_path, kind):
    out, theirs, path = tmp_path / "ds", tmp_path / "theirs", tmp_path / "ds.rejected.jsonl"
    theirs.write_text("notes without a final newline")
    async with recording(out, FakeEngine(), flush_s=60) as client:
        await sampled(client, "a/0")
        await end(client, "a/0", {"reward": 1.0})
        make_unusable(out)
        if kind == "a link":
            path.symlink_to(theirs)
        elif kind == "a directory":
            path.mkdir()
        else:
            path.write_bytes(theirs.read_bytes())
        with pytest.raises(RolloutError, match="out_is_free") as raised:
            await client.recorder.flush()
        assert str(path) in str(raised.value)
    if kind != "notes":
        with pytest.raises(RolloutError, match="out_is_free"):
            async with recording(out, FakeEngine()):
                pass
    assert theirs.read_text() == "notes without a final newline"
    if kind == "notes":
        assert path.read_bytes() == theirs.read_bytes()
    assert not list(out.glob("part-*"))
    if kind == "a directory":
        path.rmdir()
    else:
        path.unlink()
    async with recording(out, FakeEngine()):
        pass
    assert outcomes(out)["a_0"][1] is not None


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True], ids=["running", "restarted"])
async def test_the_outcome_of_a_session_with_faults_can_be_repeated(tmp_path, again, monkeypatch):
    out, outcome = tmp_path / "ds", {"reward": 1.0, "metrics": {"num_tests": 3.0}}
    first, names = {}, ("unusable/0", "lost/0", "uncalled/0")
    async with recording(out, FakeEngine(), flush_s=60, on_full="serve") as client:
        await client.post("/sessions", json={"instance_id": "uncalled", "repetition_id": 0})
        await sampled(client, "unusable/0", "lost/0")
        with monkeypatch.context() as patch:
            patch.setattr(client.recorder.journal, "_write_all", no_room)
            await sampled(client, "lost/0")
        make_unusable(out)
        for name in names:
            first[name] = await end(client, name, outcome)
        await client.recorder.flush()
        if not again:
            for name in names:
                await check_repeated(client, name, outcome, first[name])
    if again:
        async with recording(out, FakeEngine(), flush_s=60) as client:
            for name in names:
                await check_repeated(client, name, outcome, first[name])
    reached = outcomes(out)
    assert len(reached) == 3
    assert all(reward is None and error for reward, error in reached.values())
    assert not (out / ".recording" / "00000").exists()
