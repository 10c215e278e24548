"""Machines that share an object store alone: it has the dataset and the run. `make test-s3`."""

import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.machines import SETTINGS, Lab, laboratory
from tests.helpers.trainer_helpers import group_rows, write_dataset

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("s3fs", "moto"))), reason="run `make test-s3`"
    ),
]
PORT, RUN = 5000, "s3://bucket/run"
SERVER = "from moto.server import main; main()"
COPY = "import sys, s3fs; s3 = s3fs.S3FileSystem(); s3.mkdir('bucket'); s3.put(*sys.argv[1:], recursive=True)"
FETCH = "import sys, s3fs; s3fs.S3FileSystem().get(*sys.argv[1:], recursive=True)"
NUM_GROUPS = 24


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with laboratory(tmp_path_factory.mktemp("lab"), 3) as opened:
        opened.machines[2].start(sys.executable, "-c", SERVER, "-H", "0.0.0.0", "-p", str(PORT))
        yield opened


@pytest.fixture(scope="module")
def store(lab: Lab) -> dict[str, str]:
    """How the machines reach the store, with the dataset in it."""
    url = f"http://{lab.machines[2].address}:{PORT}"
    access = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    access["AWS_DEFAULT_REGION"] = "us-east-1"
    answers = f"import urllib.request; urllib.request.urlopen({url + '/moto-api/'!r})"
    until = time.monotonic() + 60
    while lab.machines[2].start(sys.executable, "-c", answers).wait() and time.monotonic() < until:
        pass
    dataset = write_dataset(lab.folder / "all", group_rows(NUM_GROUPS, (1.0, 0.0, 0.5)))
    lab.machines[2].call(sys.executable, "-c", COPY, f"{dataset}/", "bucket/ds/", **access)
    return access


def lines(lab: Lab, store: dict[str, str], folder: Path) -> list[float]:
    lab.machines[2].call(
        sys.executable, "-c", FETCH, "bucket/run/metrics.jsonl", str(folder), **store
    )
    return losses(folder / "metrics.jsonl")


def losses(file: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in file.read_text().splitlines()]


def test_a_killed_run_in_a_store_resumes_on_fresh_machines_with_the_losses_of_one(
    lab: Lab, store: dict[str, str], tmp_path: Path
) -> None:
    usual = [str(lab.folder / "all"), f"--model={lab.model}", f"--out={lab.folder / 'alone'}"]
    alone = lab.start(0, "train", *usual, *SETTINGS, size=1)
    assert alone.wait() == 0, alone.output()
    begin = ["s3://bucket/ds", f"--model={lab.model}", f"--out={RUN}", *SETTINGS]
    begin += ["--set=run.save_every_updates=1"]
    started = [lab.start(rank, "train", *begin, **store) for rank in (0, 1)]
    until, seen = time.monotonic() + 120, False
    exists = "import s3fs; print(s3fs.S3FileSystem().exists('bucket/run/checkpoints/latest'))"
    while not seen and time.monotonic() < until:
        seen = "True" in lab.machines[2].call(sys.executable, "-c", exists, **store)
    for process in started[1].processes():
        process.kill()
    assert [process.wait(120) != 0 for process in started] == [True, True]
    resumed = [lab.start(1 - rank, "train", f"--resume={RUN}", **store) for rank in (0, 1)]
    for process in resumed:
        assert process.wait() == 0, process.output()
    assert lines(lab, store, tmp_path) == pytest.approx(
        losses(lab.folder / "alone" / "metrics.jsonl"), rel=1e-4, abs=1e-6
    )
