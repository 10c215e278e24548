"""The next batch is read while this one trains, from wherever the dataset is."""

import subprocess
import sys
import threading

import fsspec
import pytest

import trainer
from schemas.errors import RolloutError
from tests.conftest import ROOT
from tests.helpers.configs import train_config
from tests.helpers.trainer_helpers import (
    group_rows,
    lines_of,
    save_tiny_model,
    write_dataset,
)
from trainer.batches.overlap import one_ahead

ENDS_WHILE_IT_READS = """
import threading
from trainer.batches.overlap import one_ahead

values = one_ahead(lambda key: key and threading.Event().wait(), [0, 1])
next(values)
print("ends")
"""


def test_values_come_in_the_order_of_their_keys():
    assert list(one_ahead(str.upper, "abc")) == ["A", "B", "C"]
    assert list(one_ahead(str.upper, "")) == []


def test_the_next_value_and_no_other_is_read_while_one_is_in_use():
    begun, may_end = [threading.Event() for _ in range(4)], threading.Event()
    read_by = []

    def read(key):
        read_by.append(threading.current_thread())
        begun[key].set()
        assert key == 0 or may_end.wait(10)
        return key

    values = one_ahead(read, range(4))
    assert next(values) == 0
    assert begun[1].wait(10)
    assert [event.is_set() for event in begun] == [True, True, False, False]
    may_end.set()
    assert list(values) == [1, 2, 3]
    assert threading.main_thread() not in read_by


def test_an_error_arrives_with_its_message_when_its_value_is_asked_for():
    def read(key):
        if key == "b":
            raise RolloutError("page_checksum", "part-0.parquet", "another one")
        return key

    values = one_ahead(read, "abc")
    assert next(values) == "a"
    with pytest.raises(RolloutError, match=r"part-0\.parquet: another one\. \[page_checksum\]"):
        next(values)


def test_a_process_that_stops_does_not_wait_for_a_read():
    command = [sys.executable, "-c", ENDS_WHILE_IT_READS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")


@pytest.fixture
def bucket():
    yield "memory://bucket"
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


@pytest.mark.slow
def test_a_dataset_in_an_object_store_trains_as_a_local_one_does(tmp_path, bucket):
    model = save_tiny_model(tmp_path / "model")
    rows = group_rows(3, (1.0, 0.0))
    local = write_dataset(tmp_path / "ds", rows)
    remote = f"{bucket}/ds"
    fsspec.filesystem("memory").put(local, "/bucket/ds", recursive=True)
    one_each = {"groups_per_batch": 1, "groups_per_mini_batch": 1, "learning_rate": 1e-3}
    for name, dataset in (("local", local), ("remote", remote)):
        paths = {"dataset": dataset, "model": model, "out": str(tmp_path / name)}
        assert trainer.train(train_config(**paths, **one_each)).num_updates == 3
    assert lines_of(tmp_path / "remote") == lines_of(tmp_path / "local")
