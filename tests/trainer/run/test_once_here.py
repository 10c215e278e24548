"""Tables that all processes of a machine need are made once there."""

import os
import socket
import subprocess
import sys

import pytest

from tests.conftest import ROOT

PROGRAM = """
import os
import polars as pl
from trainer.distributed.meeting import together
from trainer.distributed.meeting import once_here

calls = []

def make():
    calls.append(1)
    return [pl.DataFrame({"a": [1, 2]}), pl.DataFrame({"b": ["x", None]})]

together(lambda: None)
tables = once_here(make, int(os.environ["RANK"]))
print(len(calls), tables[0]["a"].to_list(), tables[1]["b"].to_list())
"""


@pytest.mark.slow
def test_one_process_makes_the_tables_and_all_have_them(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            cwd=ROOT,
            env=os.environ
            | place
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    told = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert told == [f"{number} [1, 2] ['x', None]" for number in (1, 0, 0)]
    assert list(tmp_path.iterdir()) == []
