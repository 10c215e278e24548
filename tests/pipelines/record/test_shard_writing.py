"""What keeps shards from being written ends with its cause, and repeated outcomes change nothing."""

import asyncio
import errno
import json

import pytest

from pipelines.record import shards
from schemas.errors import RolloutError
from tests.helpers.fake_engine import FakeEngine, running
from tests.helpers.recorder_helpers import TEXT, outcomes, recording


def no_room(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def broken(*_):
    raise KeyError("x")


async def until(is_so):
    async with asyncio.timeout(20):
        while not await is_so():
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("failing", [no_room, broken], ids=["full disk", "any exception"])
@pytest.mark.parametrize(
    "part",
    [(shards.rejections, "lines"), (shards.RolloutWriter, "write")],
    ids=["rejected records", "the shard"],
)
def test_shards_are_written_once_there_is_room_again_and_health_says_what_is_wrong(
    tmp_path, part, failing
):
    async def main(url):
        async with recording(tmp_path / "ds", url) as client:
            app.num_tokens = 6
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(*part, failing)
                for i in range(2):
                    await client.post(f"/s/a/{i}/v1/completions", json=TEXT)
                (folder,) = (tmp_path / "ds" / ".recording").glob("0*")
                calls = folder / "calls.jsonl"
                text = calls.read_text()
                assert '"token_ids"' in text
                same_length = text.replace('"token_ids"', '"tokem_ids"', 1)
                calls.write_text(same_length)  # the first session becomes unusable
                for i in range(2):
                    ended = await client.post(f"/s/a/{i}/end", json={"reward": 1.0})
                    assert ended.status_code == 200

                async def is_bad():
                    return (await client.get("/health")).status_code == 507

                await until(is_bad)
                health = (await client.get("/health")).json()
                assert health["status"] == "not writing shards"
                cause = "no space left" if failing is no_room else "keyerror"
                assert cause in health["problem"].lower()

            async def is_good():
                return (await client.get("/health")).json()["status"] == "ok"

            await until(is_good)
            await until(lambda: is_written(client, 1))

    async def is_written(client, i):
        return (await client.get(f"/s/a/{i}")).json()["state"] == "written"

    app = FakeEngine()
    with running(app) as url:
        asyncio.run(main(url))
    found = outcomes(tmp_path / "ds")
    assert found["a_1"] == (1.0, None)
    assert found["a_0"][1] is not None
    lines = (tmp_path / "ds.rejected.jsonl").read_text().splitlines()
    sources = [json.loads(line)["source"] for line in lines]
    assert len(sources) == len(set(sources)) == 1


ENDS = [
    {"reward": 0.25},
    {"reward": 1.0, "metrics": {"num_tests": 3.0}},
    {"error": "timeout: the tests hang"},
    {},
]


@pytest.mark.parametrize("said", ENDS, ids=["reward", "metrics", "error", "unknown"])
@pytest.mark.parametrize("flush_s", [0.02, 60.0], ids=["in a shard", "in the journal"])
@pytest.mark.parametrize("again", [False, True], ids=["running", "restarted"])
def test_a_repeated_outcome_is_accepted_and_another_one_refused(tmp_path, said, flush_s, again):
    async def check(client):
        for _ in range(2):
            repeated = await client.post("/s/a/0/end", json=said)
            assert repeated.status_code == 200, repeated.text
            assert repeated.json()["reward"] == said.get("reward")
        for other in ({"reward": 0.5}, said | {"error": "another"}, said | {"metrics": {"x": 1}}):
            refused = await client.post("/s/a/0/end", json=other)
            assert refused.status_code == 409, other

    async def main(url):
        async with recording(tmp_path / "ds", url, flush_s=flush_s) as client:
            await client.post("/s/a/0/v1/completions", json=TEXT)
            (await client.post("/s/a/0/end", json=said)).raise_for_status()
            state = "written" if flush_s < 1 else "ended"

            async def is_there():
                return (await client.get("/s/a/0")).json()["state"] == state

            await until(is_there)
            if not again:
                return await check(client)
            left = {p: p.read_bytes() for p in (tmp_path / "ds").glob(".recording/0*/*")}
        if flush_s > 1:  # as if it had been killed before its end
            for shard in (tmp_path / "ds").glob("part-*"):
                shard.unlink()
            for path, content in left.items():
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(content)
        async with recording(tmp_path / "ds", url, flush_s=60.0) as client:
            await check(client)

    with running(FakeEngine()) as url:
        asyncio.run(main(url))


def make_unusable(folder):
    """Damage the first call of a session without changing its length."""
    (calls,) = folder.glob(".recording/0*/calls.jsonl")
    calls.write_text(calls.read_text().replace('"token_ids"', '"tokem_ids"', 1))


async def flushed(client):
    await client.recorder.flush()


@pytest.mark.parametrize("cut", [0, 7, 100_000], ids=["whole", "torn", "none"])
def test_a_kill_between_rejected_calls_and_their_shard_leaves_each_line_once(
    tmp_path, cut, monkeypatch
):
    """The files at the moment of the kill are those at the moment when the shard is published."""
    out, left = tmp_path / "ds", {}
    rejected = tmp_path / "ds.rejected.jsonl"
    close = shards.RolloutWriter.close

    def closed(writer):
        files = [*out.glob(".recording/0*/*"), rejected]
        left.update({path: path.read_bytes() for path in files if not left.get(path)})
        close(writer)

    monkeypatch.setattr(shards.RolloutWriter, "close", closed)

    async def main(url):
        async with recording(out, url, flush_s=60) as client:
            for i in range(3):
                await client.post(f"/s/a/{i}/v1/completions", json=TEXT)
                if i < 2:
                    await client.post(f"/s/a/{i}/end", json={"reward": 1.0})
            make_unusable(out)
            await flushed(client)

    async def again(url):
        async with recording(out, url, flush_s=60) as client:
            await flushed(client)

    with running(FakeEngine(num_tokens=6)) as url:
        asyncio.run(main(url))
        written = outcomes(out)
        content = rejected.read_bytes()
        for path in (*out.glob("part-*"), *out.glob(".recording/0*/written.jsonl")):
            path.unlink()
        for path, kept in left.items():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(kept)
        rejected.write_bytes(content[: max(len(content) - cut, 0)])
        asyncio.run(again(url))
    assert outcomes(out) == written
    assert rejected.read_bytes() == content
    assert content.count(b"\n") == 1


@pytest.mark.parametrize("kind", ["a link", "a directory", "notes"])
def test_rejected_calls_are_not_written_into_what_is_not_their_file(tmp_path, kind):
    out, theirs, path = tmp_path / "ds", tmp_path / "theirs", tmp_path / "ds.rejected.jsonl"
    theirs.write_text("notes without a final newline")

    async def main(url):
        async with recording(out, url, flush_s=60) as client:
            await client.post("/s/a/0/v1/completions", json=TEXT)
            await client.post("/s/a/0/end", json={"reward": 1.0})
            make_unusable(out)
            if kind == "a link":
                path.symlink_to(theirs)
            elif kind == "a directory":
                path.mkdir()
            else:
                path.write_bytes(theirs.read_bytes())
            with pytest.raises(RolloutError, match="out_is_free") as raised:
                await flushed(client)
            assert str(path) in str(raised.value)

    async def again(url):
        async with recording(out, url):
            pass

    with running(FakeEngine(num_tokens=6)) as url:
        asyncio.run(main(url))
        if kind != "notes":
            with pytest.raises(RolloutError, match="out_is_free"):
                asyncio.run(again(url))
    assert theirs.read_text() == "notes without a final newline"
    if kind == "notes":
        assert path.read_bytes() == theirs.read_bytes()
    assert not list(out.glob("part-*"))
    if kind == "a directory":
        path.rmdir()
    else:
        path.unlink()
    with running(FakeEngine()) as url:
        asyncio.run(again(url))
    assert outcomes(out)["a_0"][1] is not None


@pytest.mark.parametrize("kind", ["lost", "unusable", "no calls"])
@pytest.mark.parametrize("again", [False, True], ids=["running", "restarted"])
def test_the_outcome_of_a_session_with_faults_can_be_repeated(tmp_path, kind, again, monkeypatch):
    out, said = tmp_path / "ds", {"reward": 1.0, "metrics": {"num_tests": 3.0}}

    async def check(client, first):
        repeated = await client.post("/s/a/0/end", json=said)
        assert repeated.status_code == 200, repeated.text
        names = ("reward", "error", "session", "state")
        assert [repeated.json()[n] for n in names] == [first[n] for n in names]
        for other in ({"reward": 0.5}, said | {"error": "another"}, said | {"metrics": {}}):
            assert (await client.post("/s/a/0/end", json=other)).status_code == 409

    async def main(url):
        async with recording(out, url, flush_s=60, on_full="serve") as client:
            if kind == "no calls":
                await client.post("/sessions", json={"instance_id": "a", "repetition_id": 0})
            else:
                await client.post("/s/a/0/v1/completions", json=TEXT)
            if kind == "lost":
                with monkeypatch.context() as patch:
                    patch.setattr(client.recorder.journal, "_write_all", no_room)
                    await client.post("/s/a/0/v1/completions", json=TEXT)
            if kind == "unusable":
                make_unusable(out)
            ended = await client.post("/s/a/0/end", json=said)
            assert ended.status_code == 200
            await flushed(client)
            if not again:
                return await check(client, ended.json())
        async with recording(out, url, flush_s=60) as client:
            await check(client, ended.json())

    with running(FakeEngine(num_tokens=6)) as url:
        asyncio.run(main(url))
    (outcome,) = outcomes(out).values()
    assert outcome[0] is None
    assert outcome[1]
    assert not (tmp_path / "ds" / ".recording" / "00000").exists()
