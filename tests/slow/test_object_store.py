"""Datasets in a real S3-compatible server that is busy, slow and cuts answers: `make test-s3`."""

import importlib.util
import json
import random
import time

import fsspec
import polars as pl
import pyarrow as pa
import pytest

import rollout_io
import trainer
from rollout_io.cli.main import run
from rollout_io.dataset import storage
from rollout_io.dataset.storage import Location
from schemas.columns import arrow_schema
from schemas.errors import RolloutError
from tests.conftest import EXAMPLES
from tests.helpers.configs import train_config
from tests.helpers.faulty_store import (
    BUSY,
    CUT,
    HANG,
    RESET,
    SHORT,
    SLOW,
    empty_bucket,
    no_fault,
    put,
)
from tests.helpers.peak_memory import FEW, MANY, MOST_MORE_MB, peak_mb, save_model, write_rows
from tests.helpers.refusals import refused
from tests.helpers.trainer_helpers import group_rows, save_tiny_model

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("s3fs", "moto"))), reason="run `make test-s3`"
    ),
    # s3fs closes its connections when the interpreter ends.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

NUM_GROUPS = 12
BOUND_S = 180
"""No command waits longer for a store that stays broken, if a request is tried as seldom as here: a read
that hangs ends after four requests of 15 s."""


def every_third(fault):
    return lambda asked: fault if asked.number % 3 == 2 else None


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with empty_bucket(tmp_path_factory.mktemp("moto") / "log") as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def _healthy(request):
    yield
    if "store" in request.fixturenames:
        request.getfixturevalue("store").become(no_fault)


def write_shards(path, rows, **sizes):
    schema = arrow_schema(tuple({name for row in rows for name in row}))
    with rollout_io.RolloutWriter(path, row_group_rows=8, **sizes) as writer:
        writer.write(pa.Table.from_pylist(rows, schema=schema))
    assert len(list(path.glob("*.parquet"))) > 2
    return path


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """Trajectories with long prompts in several shards and row groups."""
    rows, rng = group_rows(NUM_GROUPS, (1.0, 0.0, 1.0, 0.0)), random.Random(0)
    for row in rows:
        row["prompt_token_ids"] = [rng.randrange(97) for _ in range(20_000)]
    return write_shards(tmp_path_factory.mktemp("local") / "ds", rows, shard_bytes=1_000_000)


@pytest.fixture(scope="module")
def remote(store, local):
    for file in local.iterdir():
        put(store.upstream, f"bucket/ds/{file.name}", file.read_bytes())
    return "s3://bucket/ds"


def printed(capsys, *arguments):
    assert run([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("fault", [BUSY, CUT, SLOW, RESET])
def test_every_row_arrives_although_every_third_answer_fails(fault, store, remote, local, capsys):
    expected = rollout_io.read(local)
    stats = printed(capsys, "stats", local, "--json")
    store.become(every_third(fault))
    assert rollout_io.read(remote).equals(expected)
    assert rollout_io.check(remote).is_empty()
    assert rollout_io.scan(remote).select(pl.len()).collect().item() == expected.num_rows
    assert printed(capsys, "stats", remote, "--json") == stats
    assert store.faults()[fault] > 10


def first_shard(target):
    return "part-00000" in target


@pytest.mark.parametrize(
    ("fault", "hits"),
    [(BUSY, lambda _: True), (BUSY, first_shard), (RESET, lambda _: True), (CUT, first_shard),
     (SHORT, first_shard), (HANG, first_shard)],
    ids=["busy", "busy_shard", "reset", "cut_shard", "short_shard", "hanging_shard"],
)  # fmt: skip
def test_a_store_that_stays_broken_ends_in_one_sentence_and_in_time(
    fault, hits, store, remote, capsys, monkeypatch
):
    if fault == HANG:
        monkeypatch.setattr(storage, "_S3_TRIES", 2)
        monkeypatch.setattr(storage, "_S3_RETRIES", {"retries": {"total_max_attempts": 1}})
    store.become(lambda asked: fault if asked.method == "GET" and hits(asked.target) else None)
    began = time.monotonic()
    assert run(["validate", remote]) == 1
    assert time.monotonic() - began < BOUND_S
    printed, error = capsys.readouterr()
    assert printed == ""
    first, hint, *rest = error.strip().splitlines()
    assert first.startswith(f"Error: cannot read {remote}"), error
    assert first.endswith("[remote_store]"), error
    assert hint.startswith("Hint: check the URL, your credentials and the network")
    assert rest == []


def test_what_is_not_there_is_said_at_once(store, capsys):
    store.become(no_fault)
    for url in ("s3://bucket/none", "s3://none/ds"):
        assert run(["validate", url]) == 1
        assert f"{url}: the path does not exist. [dataset_exists]" in capsys.readouterr().err
    assert len(store.requests) < 30


def test_an_object_that_changes_while_it_is_read_is_refused(store):
    content = random.Random(0).randbytes(200_000)
    files = fsspec.filesystem("s3")
    files.pipe_file("bucket/changing.bin", content)
    location = Location.of("s3://bucket/changing.bin")
    with location.fs.open(location.path, block_size=10_000) as file:
        assert file.read(100) == content[:100]
        files.pipe_file("bucket/changing.bin", content[::-1])
        store.become(lambda asked: CUT if asked.number == 0 else None)
        with refused("remote_store"):
            file.read()


def weights_of(run_folder):
    """Every model that the run saved, by its path."""
    found = run_folder.rglob("model*.safetensors")
    return {str(path.relative_to(run_folder)): path.read_bytes() for path in found}


def metrics_of(run_folder):
    lines = [json.loads(s) for s in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in x.items() if k not in {"seconds", "tokens_per_s"}} for x in lines]


@pytest.fixture(scope="module")
def to_train(store, tmp_path_factory):
    """A tiny model, a dataset in several shards, and the run that trains on it."""
    folder = tmp_path_factory.mktemp("train")
    rows = group_rows(NUM_GROUPS, (1.0, 0.0, 1.0, 0.0))
    for file in write_shards(folder / "ds", rows, shard_bytes=2_000).iterdir():
        put(store.upstream, f"bucket/train/{file.name}", file.read_bytes())
    save_tiny_model(folder / "model")
    assert train(folder, folder / "ds", folder / "run").num_updates == 4
    return folder


def train(folder, dataset, out, *, resume=False):
    config = train_config(
        dataset=str(dataset),
        model=str(folder / "model"),
        out=str(out),
        groups_per_batch=3,
        groups_per_mini_batch=3,
        learning_rate=1e-3,
        save_every_updates=1,
    )
    return trainer.train(config, resume=resume)


def check_same_run(found, expected):
    assert metrics_of(found) == metrics_of(expected)
    assert weights_of(found) == weights_of(expected) != {}


@pytest.mark.parametrize("fault", [BUSY, CUT])
def test_training_from_a_failing_store_makes_the_same_weights(fault, store, to_train, tmp_path):
    store.become(every_third(fault))
    train(to_train, "s3://bucket/train", tmp_path / "run")
    check_same_run(tmp_path / "run", to_train / "run")
    assert store.faults()[fault] > 10


def test_a_run_whose_store_breaks_goes_on_when_it_is_back(store, to_train, tmp_path):
    out = tmp_path / "run"
    store.become(lambda _: RESET if len(metrics_written(out)) > 1 else None)
    with pytest.raises(RolloutError, match=r"cannot read s3://bucket/train/part-.*remote_store"):
        train(to_train, "s3://bucket/train", out)
    assert 1 < len(metrics_written(out)) < 4
    store.become(no_fault)
    train(to_train, "s3://bucket/train", out, resume=True)
    check_same_run(out, to_train / "run")


def test_memory_does_not_grow_with_the_tokens_of_a_dataset_in_a_store(store, tmp_path):
    model = save_model(tmp_path / "model")
    peaks = []
    for num in (FEW, MANY):
        for file in write_rows(tmp_path / str(num), num).iterdir():
            put(store.upstream, f"bucket/memory_{num}/{file.name}", file.read_bytes())
        peaks.append(peak_mb(f"s3://bucket/memory_{num}", model, tmp_path / f"run_{num}"))
    assert peaks[1] - peaks[0] < MOST_MORE_MB


def metrics_written(run_folder):
    path = run_folder / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


LOG = [str(EXAMPLES / "shop.calls.jsonl"), "--rewards", str(EXAMPLES / "shop.rewards.jsonl")]


@pytest.mark.parametrize("fault", [None, BUSY, RESET])
def test_datasets_are_written_to_a_store_as_to_a_disk(fault, store, local, remote, tmp_path):
    bucket = f"s3://bucket/out_{fault}"
    for name, arguments, dataset in (
        ("converted", ["convert", *LOG], ()),
        ("merged", ["merge"], (local, remote)),
        (
            "filtered",
            ["filter", "--max-steps", "1"],
            (tmp_path / "converted", f"{bucket}/converted"),
        ),
    ):
        ours, theirs = (str(dataset[i]) for i in (0, 1)) if dataset else ("", "")
        store.become(no_fault)
        assert run([*arguments, *filter(None, [ours]), "--out", str(tmp_path / name)]) == 0
        store.become(every_third(fault))
        assert run([*arguments, *filter(None, [theirs]), "--out", f"{bucket}/{name}"]) == 0
        check_same_files(f"{bucket}/{name}", tmp_path / name)


def check_same_files(url, folder):
    """The same shards and rows, and nothing else; the metadata names its parent by its path."""
    found = Location.of(url)
    names = {path.rsplit("/", 1)[-1] for path in found.fs.find(found.path)}
    assert names == {path.name for path in folder.iterdir()}
    assert rollout_io.read(url).equals(rollout_io.read(folder))
