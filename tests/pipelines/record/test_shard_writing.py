"""What keeps shards from being written ends with its cause, and repeated outcomes change nothing."""

import asyncio
import errno
import json

import pytest

from pipelines.record import shards
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
