import asyncio
import contextlib
import errno
import json
import os
import signal
import threading
import time

import httpx2
import pytest

from pipelines.record.journal import Journal
from rollout_io.cli.main import run
from schemas.errors import RolloutError
from tests.helpers.fake_engine import FakeEngine, running
from tests.helpers.recorder_helpers import CHAT, TEXT, outcomes, recorder_process, recording, rows

STREAM = CHAT | {"stream": True}


async def test_lines_that_wait_together_are_written_with_one_sync(tmp_path, monkeypatch):
    syncs = []
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda handle: (syncs.append(handle), real(handle)))

    journal = Journal(tmp_path)
    await asyncio.gather(*(journal.append(0, "calls", {"session": f"a/{i}"}) for i in range(64)))
    lines = (tmp_path / ".recording" / "00000" / "calls.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["session"] for line in lines) == sorted(
        f"a/{i}" for i in range(64)
    )
    assert len(syncs) <= 2


async def test_the_journal_is_a_calls_log_and_a_rewards_file_that_convert_reads(tmp_path):
    async with recording(tmp_path / "ds", FakeEngine(), flush_s=60) as client:
        for path, body in (("chat/completions", STREAM), ("completions", TEXT)):
            await client.post(f"/s/a/0/b/v1/{path}", json=body)
        await client.post("/s/a/0/end", json={"reward": 0.5, "metrics": {"speed": 2.0}})
        folder = tmp_path / "ds" / ".recording" / "00000"
        for name in ("calls", "rewards"):
            content = (folder / f"{name}.jsonl").read_bytes()
            (tmp_path / f"{name}.jsonl").write_bytes(content)
    calls, rewards = (str(tmp_path / f"{name}.jsonl") for name in ("calls", "rewards"))
    out = tmp_path / "converted"
    assert run(["convert", calls, "--rewards", rewards, "--out", str(out)]) == 0
    columns = ("prompt_token_ids", "response_ids", "rollout_logprobs", "reward", "agent", "metrics")
    assert rows(out, *columns) == rows(tmp_path / "ds", *columns)


@pytest.mark.slow
async def test_a_line_that_was_cut_off_is_removed_and_all_before_it_recovered(tmp_path):
    for tail in (b'{"session":"a/0","ti', b"{" * 3_000_000, b""):
        async with recording(tmp_path / "ds", FakeEngine()) as client:
            await client.post("/s/a/0/v1/completions", json=TEXT)
        calls = next((tmp_path / "ds").glob(".recording/*/calls.jsonl"))
        with calls.open("ab") as file:
            file.write(tail)
    async with recording(tmp_path / "ds", FakeEngine()) as client:
        assert (await client.get("/s/a/0")).json()["calls"] == 3
        await client.post("/s/a/0/end", json={"reward": 1})
    assert len(rows(tmp_path / "ds", "response_ids")) == 3


async def test_a_shard_that_was_written_before_a_crash_is_not_written_again(tmp_path):
    async with recording(tmp_path / "ds", FakeEngine(), flush_s=60) as client:
        await client.post("/s/a/0/v1/completions", json=TEXT)
        await client.post("/s/a/0/end", json={"reward": 1})
        folder = tmp_path / "ds" / ".recording" / "00000"
        journal = {path: path.read_bytes() for path in folder.iterdir()}
    for path, content in journal.items():  # as if its end had not been noted
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    async with recording(tmp_path / "ds", FakeEngine()) as client:
        assert (await client.get("/s/a/0")).json()["state"] == "written"
    assert outcomes(tmp_path / "ds") == {"a_0": (1.0, None)}


@pytest.mark.slow
async def test_long_sessions_are_written_few_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("pipelines.record.shards.SHARD_BYTES", 5000)

    async with recording(tmp_path / "ds", FakeEngine(num_tokens=20), flush_s=60) as client:
        for i in range(6):
            await client.post(f"/s/a/{i}/v1/completions", json=TEXT)
            await client.post(f"/s/a/{i}/end", json={"reward": i})
    assert outcomes(tmp_path / "ds") == {f"a_{i}": (float(i), None) for i in range(6)}
    assert 2 <= len(list((tmp_path / "ds").glob("part-*"))) <= 6


async def test_one_recorder_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("pipelines.record.shards._LOCK_WAIT_S", 0.1)

    async with recording(tmp_path / "ds", "http://127.0.0.1:9"):
        with pytest.raises(RolloutError, match="another process is writing"):
            async with recording(tmp_path / "ds", "http://127.0.0.1:9"):
                pass


TRIES = pytest.mark.parametrize(
    "num_tries", [2, pytest.param(30, marks=pytest.mark.nightly)], ids=["few", "many"]
)


@TRIES
async def test_an_engine_that_dies_in_a_stream_leaves_what_came_and_no_end(tmp_path, num_tries):
    app = FakeEngine(num_tokens=40)
    with running(app) as url:
        async with recording(tmp_path / "ds", url) as client:
            for i in range(num_tries):
                app.dies_after = 4 + i
                seen = b""
                opened = client.stream("POST", f"/s/a/{i}/v1/chat/completions", json=STREAM)
                with contextlib.suppress(httpx2.RemoteProtocolError):
                    async with opened as answer:
                        async for part in answer.aiter_raw():
                            seen += part
                        pytest.fail("an answer that broke off came to an end")
                assert seen.count(b"data:") == 3 + i
                assert b"[DONE]" not in seen
                await client.post(f"/s/a/{i}/end", json={"error": "engine died"})
    made = rows(tmp_path / "ds", "response_ids", "rollout_logprobs", "stop_reason")
    assert [row["stop_reason"] for row in made] == ["error"] * num_tries
    assert [len(row["response_ids"]) for row in made] == [3 + i for i in range(num_tries)]
    assert all(len(row["response_ids"]) == len(row["rollout_logprobs"]) for row in made)


@pytest.mark.slow
@TRIES
async def test_a_client_that_leaves_a_stream_ends_the_engines_and_what_was_sampled_stays(
    tmp_path, num_tries
):
    app, num_seen = FakeEngine(gap_s=0.02, num_tokens=100), []
    async with recording(tmp_path / "ds", app) as client:
        for i in range(num_tries):
            path, seen = f"/s/a/{i}/v1/chat/completions", b""
            async with client.stream("POST", path, json=STREAM) as answer:
                parts = answer.aiter_raw()
                while seen.count(b"data:") < 4 + i:
                    seen += await anext(parts)
            num_seen.append(seen.count(b"data:"))
        await asyncio.sleep(0.3)
        assert app.num_left == num_tries
        for i in range(num_tries):
            state = (await client.get(f"/s/a/{i}")).json()
            assert (state["under_way"], state["calls"]) == (0, 1)
            await client.post(f"/s/a/{i}/end", json={"reward": 0})
    made = rows(tmp_path / "ds", "response_ids", "stop_reason")
    assert [row["stop_reason"] for row in made] == ["abort"] * num_tries
    for row, num in zip(made, num_seen, strict=True):
        assert num <= len(row["response_ids"]) < 100


async def test_of_several_choices_that_were_cut_off_only_those_with_tokens_are_steps(tmp_path):
    with running(FakeEngine(dies_after=3)) as url:
        async with recording(tmp_path / "ds", url) as client:
            with pytest.raises(httpx2.RemoteProtocolError):
                await client.post("/s/a/0/v1/chat/completions", json=STREAM | {"n": 2})
            await client.post("/s/a/0/end", json={"reward": 0})
    assert [len(row["response_ids"]) for row in rows(tmp_path / "ds", "response_ids")] == [1]


async def test_a_client_that_leaves_a_call_that_is_not_streamed_leaves_nothing_behind(tmp_path):
    with running(FakeEngine(gap_s=0.1)) as url:
        async with recording(tmp_path / "ds", url) as client:
            with pytest.raises(httpx2.ReadTimeout):
                await client.post("/s/a/0/v1/completions", json=TEXT, timeout=0.2)
            await asyncio.sleep(0.2)
            state = (await client.get("/s/a/0")).json()
            assert (state["under_way"], state["calls"]) == (0, 0)


@pytest.mark.slow
async def test_a_client_that_leaves_while_its_call_is_written_does_not_keep_it_from_the_dataset(
    tmp_path,
):
    async with recording(tmp_path / "ds", FakeEngine()) as client:
        journal = client.recorder.journal
        write = journal._write_all
        journal._write_all = lambda entries: (time.sleep(0.5), write(entries))[1]
        for i, stream in enumerate((False, True)):
            path, body = f"/s/a/{i}/v1/completions", TEXT | {"stream": stream}
            with pytest.raises(httpx2.ReadTimeout):
                await client.post(path, json=body, timeout=0.25)
        journal._write_all = write
        await asyncio.sleep(0.6)
        for i in range(2):
            assert (await client.get(f"/s/a/{i}")).json()["calls"] == 1
            await client.post(f"/s/a/{i}/end", json={"reward": 1})
    assert outcomes(tmp_path / "ds") == {"a_0": (1.0, None), "a_1": (1.0, None)}


@pytest.mark.slow
async def test_a_session_stays_with_one_engine_and_moves_when_that_is_away(tmp_path):
    apps = [FakeEngine(), FakeEngine()]
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(running(app)) for app in apps]
        async with recording(tmp_path / "ds", *urls, "http://127.0.0.1:9") as client:
            for i in range(8):
                for _ in range(2):
                    answer = await client.post(f"/s/a/{i}/v1/completions", json=TEXT)
                    assert answer.status_code == 200
            num = [len(app.requests) for app in apps]
            assert sum(num) == 16
            assert all(n % 2 == 0 and n > 0 for n in num)
            apps[0].status = 503
            for i in range(4):
                answer = await client.post(f"/s/a/{i}/v1/completions", json=TEXT)
                assert answer.status_code == 200


def load(url, counts, stop):
    """Sessions of two calls, until told to stop; which calls and ends were answered."""

    async def session(client, i):
        for j in range(2):
            body = {"model": "fake", "prompt": f"p{i}", "stream": bool((i + j) % 2)}
            answer = await client.post(f"/s/k/{i}/v1/completions", json=body)
            if answer.status_code == 200 and (not body["stream"] or b"[DONE]" in answer.content):
                counts["calls"][i] = counts["calls"].get(i, 0) + 1
        if (await client.post(f"/s/k/{i}/end", json={"reward": float(i)})).status_code == 200:
            counts["ended"].add(i)

    async def main():
        async with httpx2.AsyncClient(base_url=url, timeout=10) as client:
            while not stop.is_set():
                first = counts["next"]
                counts["next"] = first + 16
                work = [session(client, i) for i in range(first, first + 16)]
                await asyncio.gather(*work, return_exceptions=True)

    asyncio.run(main())


@pytest.mark.slow
@TRIES
def test_a_recorder_that_is_killed_under_load_loses_nothing_and_has_nothing_twice(
    tmp_path, num_tries
):
    out, counts = tmp_path / "ds", {"calls": {}, "ended": set(), "next": 0}
    with running(FakeEngine()) as engine:
        arguments = ["--upstream", engine]
        for i in range(num_tries):
            with recorder_process(out, *arguments) as (process, url):
                stop = threading.Event()
                thread = threading.Thread(target=load, args=(url, counts, stop))
                thread.start()
                enough = len(counts["ended"]) + 12
                while len(counts["ended"]) < enough:
                    time.sleep(0.02)
                time.sleep(0.07 * (i % 7))
                os.kill(process.pid, signal.SIGKILL)
                stop.set()
                thread.join()
        recover(out)
    found = outcomes(out)
    for i in counts["ended"]:
        assert found[f"k_{i}"] == (float(i), None)
    steps = [row["trajectory_id"] for row in rows(out, "trajectory_id")]
    for i, num_calls in counts["calls"].items():
        assert num_calls <= steps.count(f"k_{i}") <= 2
    assert run(["validate", str(out)]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("on_full", ["refuse", "serve"])
@pytest.mark.parametrize(
    "num_tries", [1, pytest.param(15, marks=pytest.mark.nightly)], ids=["few", "many"]
)
def test_on_a_full_disk_clients_get_a_clear_error_or_are_served_unrecorded(
    tmp_path, on_full, num_tries
):
    with running(FakeEngine(num_tokens=60)) as engine:
        for i in range(num_tries):
            fill(tmp_path / str(i), engine, on_full, limit_bytes=60_000 - 1777 * i)


def fill(out, engine, on_full, limit_bytes):
    """Call until a recorder's disk is full and beyond; what it said it has is there in the end."""
    given = ("--upstream", engine, "--on-full", on_full)
    with (
        recorder_process(out, *given, limit_bytes=limit_bytes) as (process, url),
        httpx2.Client(base_url=url, timeout=30) as client,
    ):
        kinds = [ask(client, stream=i % 2 == 1) for i in range(12)]
        assert client.get("/health").status_code == 507
        state = client.get("/s/a/0").json()
        num_kept = state["calls"]
    assert kinds[:2] == ["answered"] * 2
    assert kinds[-1] == ("refused" if on_full == "refuse" else "answered")
    assert kinds.count("answered") == (num_kept if on_full == "refuse" else 12)
    assert state["unrecorded_calls"] == (0 if on_full == "refuse" else 12 - num_kept)
    assert num_kept < 12
    assert (
        "calls are refused" if on_full == "refuse" else "served without recording"
    ) in process.said
    recover(out)
    assert len(rows(out, "response_ids")) == num_kept


def recover(out):
    """Start again, and end what is open."""

    async def main():
        async with recording(out, "http://127.0.0.1:9", end_open=True):
            pass

    asyncio.run(main())


def no_room(_):
    raise OSError(errno.ENOSPC, "No space left on device")


async def test_health_is_bad_until_there_is_room_for_a_call_as_long_as_the_refused_one(tmp_path):
    path, long = "/s/a/0/v1/completions", TEXT | {"user": "u" * 30_000}
    async with recording(tmp_path / "ds", FakeEngine()) as client:
        write = client.recorder.journal._write_all

        def with_little_room(entries):
            if max(len(entry.content) for entry in entries) > 20_000:
                no_room(entries)
            return write(entries)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(client.recorder.journal, "_write_all", with_little_room)
            assert (await client.post(path, json=TEXT)).status_code == 200
            assert (await client.post(path, json=long)).status_code == 507
            for _ in range(2):
                assert (await client.get("/health")).status_code == 507
                assert (await client.post(path, json=TEXT)).status_code == 507
        assert (await client.get("/health")).status_code == 200
        assert (await client.post(path, json=long)).status_code == 200


@pytest.mark.parametrize("on_full", ["refuse", "serve"])
async def test_once_there_is_room_again_calls_are_recorded_and_what_was_lost_is_said(
    tmp_path, on_full
):
    async with recording(tmp_path / "ds", FakeEngine(), on_full=on_full) as client:
        path = "/s/a/0/v1/completions"
        assert (await client.post(path, json=TEXT)).status_code == 200
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(client.recorder.journal, "_write_all", no_room)
            full = await client.post(path, json=TEXT)
            assert full.status_code == (507 if on_full == "refuse" else 200)
            ending = await client.post("/s/a/0/end", json={"reward": 1.0})
            assert ending.status_code == 507
        assert (await client.get("/health")).status_code == 200
        assert (await client.post(path, json=TEXT)).status_code == 200
        assert (await client.post("/s/a/0/end", json={"reward": 1.0})).status_code == 200
    lost = "calls_lost: 1 call could not be written"
    expected = (1.0, None) if on_full == "refuse" else (None, lost)
    assert outcomes(tmp_path / "ds") == {"a_0": expected}
    assert len(rows(tmp_path / "ds", "response_ids")) == 2


@pytest.mark.slow
async def test_what_was_lost_is_said_by_the_next_recorder_too(tmp_path):
    with running(FakeEngine()) as url:
        path = "/s/a/0/v1/completions"
        async with recording(tmp_path / "ds", url, on_full="serve") as client:
            assert (await client.post(path, json=TEXT)).status_code == 200
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(client.recorder.journal, "_write_all", no_room)
                assert (await client.post(path, json=TEXT)).status_code == 200
        async with recording(tmp_path / "ds", url, on_full="serve") as client:
            assert (await client.get("/s/a/0")).json()["unrecorded_calls"] == 1
            await client.post("/s/a/0/end", json={"reward": 1.0})
    lost = "calls_lost: 1 call could not be written"
    assert outcomes(tmp_path / "ds") == {"a_0": (None, lost)}


def ask(client, *, stream):
    answer = client.post("/s/a/0/v1/completions", json=TEXT | {"stream": stream})
    if answer.status_code == 200 and (not stream or b"[DONE]" in answer.content):
        return "answered"
    assert b'"type":"journal"' in answer.content
    assert answer.status_code == (200 if b"data:" in answer.content else 507)
    return "refused"


@pytest.mark.slow
def test_a_recorder_that_is_told_to_stop_finishes_calls_and_writes_shards(tmp_path):
    out = tmp_path / "ds"
    with running(FakeEngine(gap_s=0.1)) as engine:
        with recorder_process(out, "--upstream", engine, "--end-open") as (process, url):
            answers = []
            ask = lambda: answers.append(  # noqa: E731
                httpx2.post(f"{url}/s/a/0/v1/completions", json=TEXT | {"stream": True})
            )
            thread = threading.Thread(target=ask)
            thread.start()
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            thread.join()
            assert answers[0].text.endswith("data: [DONE]\n\n")
        assert process.returncode == 0
        assert "rollouts validate" in process.said
    assert outcomes(out) == {"a_0": (None, None)}


@pytest.mark.parametrize("linked", [".", "00000", "00000/calls.jsonl", "00000/written.jsonl"])
async def test_links_in_place_of_a_journal_are_refused_and_nothing_of_others_is_deleted(
    tmp_path, linked
):
    others, journal = tmp_path / "others", tmp_path / "ds" / ".recording"
    for name in ("00007.done", "00003"):
        (others / name).mkdir(parents=True)
    path = journal / linked
    path.parent.mkdir(parents=True, exist_ok=True)
    if linked.endswith("jsonl"):
        others = others / "notes"
        others.write_text("notes without a final newline")
    path.symlink_to(others)
    before = {p: p.is_file() and p.read_text() for p in (tmp_path / "others").rglob("*")}

    with pytest.raises(RolloutError, match="symbolic link"):
        async with recording(tmp_path / "ds", "http://127.0.0.1:9"):
            pass
    assert {p: p.is_file() and p.read_text() for p in (tmp_path / "others").rglob("*")} == before


async def test_folders_of_others_in_a_journal_stay(tmp_path):
    journal = tmp_path / "ds" / ".recording"
    names = ["notes.done", "7.done", "\u00b2", "\u00b2.done", "7", "notes"]
    for name in names:
        (journal / name).mkdir(parents=True)
        (journal / name / "mine").write_text("mine")

    async with recording(tmp_path / "ds", "http://127.0.0.1:9"):
        pass
    assert all((journal / name / "mine").read_text() == "mine" for name in names)
