"""`--engine ray` on two nodes, each with its own object store, while workers are killed."""

import json
import os
import subprocess
import sys

import pytest

from pipelines.merging.merge import merge_table
from rollout_io import convert, read_metadata
from rollout_io.dataset.rewriting import rewrite
from tests.conftest import ROOT
from tests.helpers.conversion_helpers import files_in
from tests.helpers.kill_helpers import write_log

CHUNK_BYTES = 4_000_000


@pytest.mark.nightly
def test_two_nodes_with_killed_workers_write_what_this_process_writes(tmp_path):
    pytest.importorskip("ray")
    log = write_log(tmp_path / "calls.jsonl", 40_000_000)
    convert(log, tmp_path / "one" / "converted", chunk_bytes=CHUNK_BYTES)
    metadata = read_metadata(tmp_path / "one" / "converted")
    made = metadata.made("merge", parents=["ds"], rule="lineage")
    paths = (str(tmp_path / "one" / name) for name in ("converted", "merged"))
    rewrite(*paths, merge_table, made, decode=False)
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "tests.helpers.ray_nodes"),
            *(str(log), str(tmp_path / "two"), str(CHUNK_BYTES)),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads((tmp_path / "two.json").read_text())
    assert told["num_nodes"] == 2
    assert len(told["killed"]) >= 2
    assert files_in(tmp_path / "two") == files_in(tmp_path / "one")
