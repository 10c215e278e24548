"""Which process gets which row, and what all of them learn about it."""

import json
import os
import subprocess
import sys
from itertools import pairwise

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import ROOT
from tests.helpers.tree_helpers import config_of
from trainer.distributed.balance import cost, outline, ranks_of


@st.composite
def tables(draw):
    """Rows of a batch as all processes know them: groups one after another, each in one mini-batch."""
    rows = []
    for group in range(draw(st.integers(1, 5))):
        mini_batch = draw(st.integers(0, 1))
        for attempt in range(draw(st.integers(1, 4))):
            rows += [
                {
                    "instance_id": f"g{group}",
                    "trajectory_id": f"g{group}_{attempt}",
                    "mini_batch": mini_batch,
                    "num_forwarded": length,
                }
                for length in draw(st.lists(st.integers(0, 500), min_size=1, max_size=4))
            ]
    return pl.DataFrame(rows)


@pytest.mark.parametrize("layout", ["step", "tree"])
@pytest.mark.parametrize("estimator", ["grpo", "reinforce++"])
@given(table=tables(), num_ranks=st.integers(1, 6), scope=st.sampled_from(["group", "trajectory"]))
def test_every_row_with_a_target_has_a_process_and_a_chain_has_one(
    layout, estimator, table, num_ranks, scope
):
    config = config_of(sequence_layout=layout, tree_scope=scope, estimator=estimator)
    ranks = ranks_of(table, config, num_ranks)
    is_forwarded = (table["num_forwarded"] > 0).to_numpy()
    assert ((ranks >= 0) & (ranks < num_ranks))[is_forwarded].all()
    if num_ranks == 1:
        assert set(ranks[is_forwarded].tolist()) <= {0}
    if estimator == "reinforce++":
        of_chain = table.with_columns(rank=ranks).group_by("trajectory_id", "mini_batch")
        assert of_chain.agg(pl.col("rank").n_unique())["rank"].max() == 1


def test_one_large_tree_is_shared_by_all_processes():
    row = {"instance_id": "a", "trajectory_id": "a_0", "mini_batch": 0, "num_forwarded": 100}
    table = pl.DataFrame([row] * 12)
    for num_ranks in (1, 2, 3, 4):
        ranks = ranks_of(table, config_of(sequence_layout="tree"), num_ranks)
        loads = np.bincount(ranks, cost(table["num_forwarded"].to_numpy()), num_ranks)
        assert np.ptp(loads) < 1e-6
        assert (np.diff(np.flatnonzero(ranks == ranks[0])) == 1).all()


def test_a_process_that_read_no_row_tells_nothing():
    assert outline(None, pl.DataFrame(), config_of()) is None


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["step", "tree"])
def test_bytes_received_and_tokens_packed_by_a_process_fall_with_the_processes(layout):
    command = [sys.executable, "-m", "benchmarks.data_plane", "--processes", "2", "4"]
    done = subprocess.run(
        [*command, "--tokens", "400000", "--row-tokens", "2000", "--layout", layout],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for few, many in pairwise(lines):
        assert many["exchange_bytes"] < 0.65 * few["exchange_bytes"]
        assert many["tokens"] < 0.65 * few["tokens"]
        assert many["metrics_bytes"] == few["metrics_bytes"] < 20_000
