import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from contextlib import nullcontext
from functools import partial

import pyarrow as pa
import pytest

from pipelines.merging.merge import merge_table
from rollout_io import RolloutWriter, check, iter_tables, read, read_metadata
from rollout_io.conversion import driver
from rollout_io.conversion.chunk import Chunk
from rollout_io.conversion.plan import Keywords, plan_logs
from rollout_io.dataset.footer import Part
from rollout_io.dataset.parallel import Workers
from rollout_io.dataset.rewriting import rewrite
from rollout_io.formats.base import Input
from rollout_io.formats.calls import find_sessions
from schemas.errors import RolloutError
from tests.conftest import EXAMPLES, ROOT
from tests.helpers.conversion_helpers import files_in
from tests.helpers.refusals import refused
from tests.helpers.table_helpers import STEPS
from tests.helpers.worker_helpers import imports_pandas


@pytest.fixture(scope="module")
def sharded(shop_dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp("sharded") / "ds"
    metadata = read_metadata(shop_dataset)
    with RolloutWriter(out, metadata=metadata, row_group_rows=20, shard_bytes=30_000) as writer:
        writer.write(read(shop_dataset))
    assert len(list(out.glob("*.parquet"))) > 2
    return out


def merged(dataset, out, workers=None, transform=merge_table):
    metadata = read_metadata(dataset).made("merge", parents=["ds"], rule="lineage")
    rewrite(str(dataset), str(out), transform, metadata, decode=False, workers=workers)
    return files_in(out)


@pytest.mark.slow
def test_two_processes_write_what_one_does(sharded, tmp_path):
    one = merged(sharded, tmp_path / "one")
    assert merged(sharded, tmp_path / "two", Workers(2)) == one
    assert not (tmp_path / "two" / ".converting").exists()


def fail_at(num_rows, table):
    if table.num_rows == num_rows:
        raise RolloutError("rule", "there", "this", "that", "do it")
    return merge_table(table)


@pytest.mark.slow
def test_an_error_of_a_process_comes_back_as_it_is_and_nothing_stays(sharded, tmp_path):
    last = read(max(sharded.glob("*.parquet"))).num_rows
    with refused("rule", where="there", got="this", expected="that", hint="do it"):
        merged(sharded, tmp_path / "out", Workers(2), partial(fail_at, last))
    assert not (tmp_path / "out").exists()


class Stop(BaseException):
    pass


def stop_after(num, table, seen):
    seen.append(table)
    if len(seen) > num:
        raise Stop
    return merge_table(table)


@pytest.mark.slow
def test_a_stopped_merge_goes_on_from_the_shards_that_are_done(sharded, tmp_path):
    seen = []
    with pytest.raises(Stop):
        merged(sharded, tmp_path / "out", transform=partial(stop_after, 3, seen=seen))
    assert not list((tmp_path / "out").glob("*.parquet"))
    rest = []
    again = merged(sharded, tmp_path / "out", transform=partial(stop_after, 1000, seen=rest))
    assert 0 < sum(map(len, rest)) < sum(map(len, iter_tables(sharded)))
    assert again == merged(sharded, tmp_path / "undisturbed")


def broken_shards(tmp_path, *tables):
    for i, table in enumerate(tables):
        with RolloutWriter(tmp_path / "one", checked=True, append=i > 0) as writer:
            writer.write(table)
    return tmp_path / "one"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["valid", "twice", "open", "negative"])
def test_two_processes_find_the_breaches_that_one_finds(case, tmp_path):
    first = pa.table(STEPS)
    other = first.set_column(0, "instance_id", pa.array(["b", "b"]))
    other = other.set_column(2, "trajectory_id", pa.array(["b_0", "b_0"]))
    if case == "twice":
        other = first
    if case == "open":
        first = first.set_column(4, "is_last_step", pa.array([False, False]))
    if case == "negative":
        ids = pa.array([[-1], [4]], pa.list_(pa.int32()))
        other = other.set_column(6, "response_ids", ids)
    dataset = broken_shards(tmp_path, first, other)
    one = check(dataset)
    assert one.is_empty() == (case == "valid")
    assert check(dataset, Workers(2)).equals(one)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["die", "die_while_answering", "fail", "wait_for_ever"])
def test_work_ends_when_processes_fail_or_it_is_interrupted_with_large_messages_under_way(name):
    command = [sys.executable, "-m", "tests.helpers.worker_helpers", name]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert ("killed by SIGKILL" in done.stdout) == name.startswith("die")
    assert ("No space left on device" in done.stdout) == (name == "fail")


def test_a_worker_process_builds_arrow_arrays_without_importing_pandas():
    assert dict(Workers(2).map(imports_pandas, [[0], [1]])) == {0: False, 1: False}


def test_a_pool_has_its_processes_before_its_tasks_and_none_after():
    with Workers(3).started(len, 2) as pool:
        assert len(multiprocessing.active_children()) == 2
        assert dict(pool.map(len, (text for text in ["a", "bc", "", "def"]))) == {
            0: 1,
            1: 2,
            2: 0,
            3: 3,
        }
    assert not multiprocessing.active_children()


@pytest.mark.slow
@pytest.mark.parametrize("is_empty", [False, True])
def test_processes_that_convert_start_while_the_runs_are_found(is_empty, tmp_path, monkeypatch):
    seen = []

    def planned(*args):
        seen.append(len(multiprocessing.active_children()))
        return plan_logs(*args)

    monkeypatch.setattr(driver, "plan_logs", planned)
    log = tmp_path / "calls.jsonl"
    log.write_text("" if is_empty else (EXAMPLES / "shop.calls.jsonl").read_text())
    choices = Keywords(format="calls")
    with pytest.raises(RolloutError) if is_empty else nullcontext():
        driver.convert([log], tmp_path / "ds", **choices, workers=2, chunk_bytes=100_000)
    assert seen == [2 - is_empty]
    assert not multiprocessing.active_children()


def test_a_task_of_a_conversion_holds_places_and_no_records(tmp_path):
    lines = "".join(
        json.dumps({"session": f"a/{i}", "request": "x" * 10_000, "response": {}}) + "\n"
        for i in range(1_000)
    )
    path = tmp_path / "calls.jsonl"
    path.write_text(lines)
    found = find_sessions([Input("calls.jsonl", path)], lambda _: None)
    runs = plan_logs([found], {})[0][0].runs
    assert len(pickle.dumps(Chunk(part=Part(writing=""), runs=runs, out=""))) < len(lines) / 50


@pytest.mark.slow
def test_a_ray_that_is_not_there_is_refused_at_once(sharded, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with refused("ray_address", where="127.0.0.1:9", got="connection refused"):
        check(sharded, Workers(2, "ray"))


RAY = """
import sys
from rollout_io.cli.main import run
import ray
ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
         _node_ip_address="127.0.0.1")
for line in sys.argv[1:]:
    code = run([*line.split(), "--engine", "ray", "--workers", "2"])
    assert code == 0, (line, code)
"""


def on_ray(*lines):
    """What these command lines print, with two workers of a Ray of their own."""
    pytest.importorskip("ray")
    command = [sys.executable, "-W", "ignore", "-c", RAY, *lines]
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": "."}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_two_workers_of_a_local_ray_convert_as_this_machine_does(shop_dataset, tmp_path):
    calls, rewards = (EXAMPLES / f"shop.{name}.jsonl" for name in ("calls", "rewards"))
    on_ray(f"convert {calls} --rewards {rewards} --out {tmp_path / 'converted'}")
    assert read(tmp_path / "converted").equals(read(shop_dataset))


@pytest.mark.nightly  # they share their loop over tasks with `convert`
def test_two_workers_of_a_local_ray_merge_and_diagnose_as_this_machine_does(sharded, tmp_path):
    printed = on_ray(
        f"merge {sharded} --out {tmp_path / 'merged'}",
        f"drift {sharded} --json",
        f"stats {sharded} --json",
    )
    command_line("merge", sharded, "--out", tmp_path / "local")
    assert files_in(tmp_path / "merged") == files_in(tmp_path / "local")
    drift, stats = (command_line(verb, sharded, "--json") for verb in ("drift", "stats"))
    assert printed.startswith(drift)
    assert rounded(printed.removeprefix(drift)) == rounded(stats)


def rounded(numbers):
    """Without the last digits, which depend on the order that Polars' threads sum in."""
    return json.loads(numbers, parse_float=lambda text: float(f"{float(text):.10g}"))


def command_line(*arguments):
    run = "from rollout_io.cli.main import run; import sys; sys.exit(run(sys.argv[1:]))"
    command = [sys.executable, "-c", run, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
