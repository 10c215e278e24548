"""`rollouts view` as a process: its address, its end, its errors."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import httpx2
import pytest

from benchmarks.logs import write_sessions
from rollout_io.cli.main import run as main
from tests.conftest import ROOT
from tests.helpers.view_helpers import bundle_in

COMMAND = """
import sys
from pathlib import Path
from pipelines.view import app
app.Bundle.read.__func__.__defaults__ = (Path(sys.argv.pop(1)),)
from rollout_io.cli.main import main
main(sys.argv[1:])
"""


@contextmanager
def started_at(path, tmp_path):
    """The verb in a process of its own, with a small page, and its address."""
    bundle_in(tmp_path / "bundle")
    command = [sys.executable, "-c", COMMAND, str(tmp_path / "bundle")]
    command += ["view", str(path), "--no-browser"]
    (tmp_path / "temporary").mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "temporary")}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.fixture
def started(shop, tmp_path):
    """A viewer of the shop."""
    with started_at(shop, tmp_path) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_verb_prints_an_address_and_ends_on_a_signal(started, number):
    process, address = started
    url, _, token = address.partition("/?token=")
    assert url.startswith("http://127.0.0.1:")
    assert len(token) == 32
    answer = httpx2.get(f"{url}/api/sources", headers={"X-Rollouts-Token": token})
    assert answer.json()["datasets"][0]["num_rows"] == 205
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "tokens are shown as ids" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_logs_are_read_by_a_process_that_ends_with_the_viewer(tmp_path):
    num = write_sessions(tmp_path / "logs", 100_000, session_bytes=10_000)
    with started_at(tmp_path / "logs", tmp_path) as (process, address):
        url, _, token = address.partition("/?token=")

        def log():
            answer = httpx2.get(f"{url}/api/sources", headers={"X-Rollouts-Token": token})
            (dataset,) = answer.json()["datasets"]
            return dataset["log"], dataset["num_trajectories"]

        while not log()[0]["is_done"]:
            pass
        assert log()[1] == num
        assert list((tmp_path / "temporary").iterdir())
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Traceback" not in said
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["a", "b", "c"], 2, "at most two"),
        (["a", "--where", "return > 0"], 2, "--out"),
        (["a", "--limit", "3"], 2, "--out"),
        ([], 2, "missing argument"),
    ],
)
def test_a_wrong_command_says_what_is_wrong(arguments, code, words, capsys):
    assert main(["view", *arguments]) == code
    assert words in capsys.readouterr().err


def test_a_dataset_that_breaks_an_invariant_is_refused(shop, tmp_path, monkeypatch, capsys):
    bundle = bundle_in(tmp_path / "bundle")
    monkeypatch.setattr("pipelines.view.app.Bundle.read", lambda: bundle)
    assert main(["view", str(tmp_path / "none"), "--no-browser"]) == 1
    assert "[dataset_exists]" in capsys.readouterr().err
    (shard,) = shop.glob("*.parquet")
    broken = tmp_path / "broken"
    broken.mkdir()
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 0xFF
    (broken / shard.name).write_bytes(content)
    assert main(["view", str(broken), "--no-browser"]) == 1
    assert "[readable_file]" in capsys.readouterr().err


ASK = """
import sys
from pipelines.view.api import Api
from pipelines.view.sources import Sources
api = Api(Sources.open(sys.argv[1:2], sys.argv[2]))
for question in (
    "trajectories?where=max(reward) OVER (PARTITION BY instance_id) > 0", "histogram?column=return",
    "group?instance_id=shop-0", "tree?instance_id=shop-0", "conversation?trajectory_id=shop-0_0",
    "tokens?trajectory_id=shop-0_0", "search?ids=5",
):
    api.answer(f"/api/datasets/d0/{question}")
print([name for name in ("pandas", "torch", "transformers") if name in sys.modules])
"""


@pytest.mark.slow
def test_no_first_answer_waits_for_heavy_imports(shop, smollm2_dir):
    """pyarrow imports pandas, to recognise its objects; Transformers' tokenizers import torch."""
    command = [sys.executable, "-c", ASK, str(shop), str(smollm2_dir)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
