import subprocess
import sys

import pytest

import rollout_io
from benchmarks.synthetic import growing_trajectories

ABANDONED = {
    "head": "print(pipelines.merge(scan).head(3).collect().height)",
    "batches": "next(iter(scan.collect_batches(engine='streaming')))",
    "exception": "list(map(int.fail, pipelines.merge(scan).collect_batches()))",
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("sources") / "ds"
    with rollout_io.RolloutWriter(path, row_group_rows=40, checked=True) as writer:
        writer.write(growing_trajectories(200, 10, 200))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "left",
    ["head", *(pytest.param(left, marks=pytest.mark.nightly) for left in list(ABANDONED)[1:])],
)
def test_a_process_that_leaves_a_query_early_ends_as_it_should(left, dataset):
    """Polars' threads must be out of our generators before the interpreter goes."""
    code = (
        f"import sys, pipelines, rollout_io; scan = rollout_io.scan(sys.argv[1]); {ABANDONED[left]}"
    )
    for _ in range(3):
        command = [sys.executable, "-c", code, str(dataset)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == (1 if left == "exception" else 0), done.stderr
        assert "FATAL" not in done.stderr
