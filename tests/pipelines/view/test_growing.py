"""Logs and runs that grow while they are shown: what they gain appears, exactly as if opened anew."""

import json
import time

import pytest

from pipelines.view import log_dataset
from pipelines.view.api import Api
from pipelines.view.sources import Sources
from tests.helpers.view_helpers import Asked
from tests.pipelines.view.test_iterations import (
    ADVANTAGES,
    LINES,
    RESPONSES,
    write_dataset,
    write_records,
)
from tests.pipelines.view.test_logs import CHAT, write_chats

DEADLINE_S = 60.0


def changed(sources, stamp):
    """Ask as the page does until the stamp differs; fails after a minute."""
    end = time.monotonic() + DEADLINE_S
    while sources.changes() == stamp:
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def unhurried(monkeypatch):
    """Look at once, and read again without a pause."""
    monkeypatch.setattr(log_dataset, "_LOOK_S", 0.0)
    monkeypatch.setattr(log_dataset, "_READ_SHARE", 0)


def table_of(sources):
    answer = Api(sources).answer("/api/datasets/d0/trajectories")
    return Asked.decoded(answer).sort("trajectory_id").to_dicts()


@pytest.fixture
def logs(tmp_path):
    """A directory with one chat, opened as `rollouts view` opens it."""
    folder = tmp_path / "logs"
    folder.mkdir()
    write_chats(folder / "door.jsonl", CHAT, task="door")
    sources = Sources.open([str(folder)], is_live=True)
    sources.datasets["d0"].wait()
    return folder, sources


@pytest.mark.slow
def test_a_new_file_and_a_longer_one_appear_as_if_the_logs_were_opened_anew(logs):
    folder, sources = logs
    stamp = sources.changes()
    write_chats(folder / "window.jsonl", CHAT, task="window")
    changed(sources, stamp)
    stamp = sources.changes()
    write_chats(folder / "door.jsonl", CHAT[:2], CHAT, task="door")
    changed(sources, stamp)
    assert table_of(sources) == table_of(Sources.open([str(folder)]))
    assert len(table_of(sources)) == 3


def test_logs_that_did_not_change_are_not_read_again(logs):
    _, sources = logs
    dataset, stamp = sources.datasets["d0"], sources.changes()
    assert [sources.changes() for _ in range(20)] == [stamp] * 20
    assert sources.datasets["d0"] is dataset


def test_a_conversation_that_is_read_while_its_log_is_read_again_is_whole(logs):
    """The old index and its files are used until the last request about them ends."""
    folder, sources = logs
    stamp, before = sources.changes(), sources.dataset("d0")
    write_chats(folder / "window.jsonl", CHAT, task="window")
    changed(sources, stamp)
    assert before.trajectory(0, ["trajectory_id"]).num_rows > 0


def test_a_log_that_was_removed_or_damaged_leaves_what_was_read(logs):
    folder, sources = logs
    stamp, shown = sources.changes(), table_of(sources)
    (folder / "door.jsonl").write_text("no longer a log\n")
    (folder / "door.jsonl").rename(folder / "door.txt")
    sources.changes()
    sources.datasets["d0"]._successor.wait()
    assert sources.changes() == stamp
    assert table_of(sources) == shown


def test_an_iteration_and_metrics_that_a_run_writes_appear(tmp_path):
    run = tmp_path / "run"
    iterations = [str(run / "rollouts" / f"iteration_{number:05d}") for number in range(2)]
    write_dataset(iterations[0], RESPONSES[0])
    write_records(run, 1, iterations[0], RESPONSES[0], ADVANTAGES[0])
    metrics = run / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in LINES[:2]))
    sources = Sources.open([str(run)], is_live=True)
    stamp = sources.changes()
    unfinished = run / "rollouts" / "iteration_00001"
    unfinished.mkdir()
    assert sources.changes() == stamp  # a dataset that is being written is not shown yet
    unfinished.rmdir()
    write_dataset(iterations[1], RESPONSES[1])
    write_records(run, 2, iterations[1], RESPONSES[1], ADVANTAGES[1])
    metrics.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    assert sources.changes() != stamp
    anew = Sources.open([str(run)])
    assert sources.describe() | {"stamp": ""} == anew.describe() | {"stamp": ""}
    ask = json.loads(Api(sources).answer("/api/runs/r0/metrics").body)
    assert ask["updates"] == [1, 2]
