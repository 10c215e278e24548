import subprocess
import sys

import pytest

ABANDONED = {
    "head": "print(pipelines.merge(scan).head(3).collect().height)",
    "batches": "next(iter(scan.collect_batches(engine='streaming')))",
    "exception": "list(map(int.fail, pipelines.merge(scan).collect_batches()))",
}


@pytest.mark.parametrize("left", ABANDONED)
def test_a_process_that_leaves_a_query_early_ends_as_it_should(left, tmp_path):
    """Polars' threads must be out of our generators before the interpreter goes."""
    code = (
        f"import sys, pipelines, rollout_io; scan = rollout_io.scan(sys.argv[1]); {ABANDONED[left]}"
    )
    make = (
        "import sys; from benchmarks.synthetic import growing_trajectories; import rollout_io\n"
        "with rollout_io.RolloutWriter(sys.argv[1], row_group_rows=40, checked=True) as w:\n"
        "    w.write(growing_trajectories(200, 10, 200))"
    )
    subprocess.run([sys.executable, "-c", make, str(tmp_path / "ds")], check=True)
    for _ in range(3):
        command = [sys.executable, "-c", code, str(tmp_path / "ds")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == (1 if left == "exception" else 0), done.stderr
        assert "FATAL" not in done.stderr
