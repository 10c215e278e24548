import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import rollout_io
from tests.conftest import ROOT

pytestmark = pytest.mark.vllm

PAGE = (ROOT / "docs" / "record.md").read_text()


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_the_commands_of_the_page_record_three_harnesses(small_server, tmp_path):
    if not (ROOT / ".venv-clients" / "bin" / "mini").exists():
        pytest.skip("no .venv-clients: run `make test-vllm`")
    (tmp_path / ".venv-clients").symlink_to(ROOT / ".venv-clients")
    small = ROOT / "tests" / "data" / "mini_small_model.yaml"
    (tmp_path / small.name).write_text(small.read_text())
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 5
    script = "set -e\ntrap 'kill %1; wait' EXIT\n" + "\n".join(blocks)
    script = script.replace("http://127.0.0.1:8000", small_server.url)
    script = script.replace("8100", str(free_port()))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PATH": path, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rollout_io.scan(tmp_path / "runs" / "recorded").collect()
    names = set(rows["trajectory_id"])
    assert names == {*(f"capital_{i}" for i in range(4)), "colours_0", "hello_0"}
    assert len(rows) == 4 + 3 + 3
    assert "error" not in rows.columns
