"""The processes of `--num-processes`: they start, and end, together."""

import json
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from schemas.errors import ConfigError, InputError
from tests.helpers.configs import train_config
from tests.helpers.rl_helpers import as_toml, config_of, lines_of, save_model
from tests.helpers.trainer_helpers import group_rows, save_tiny_model, write_dataset
from trainer.cli import in_processes
from trainer.distributed import spawn
from trainer.distributed.accelerator import make_accelerator
from trainer.distributed.processes import STARTER, STORE

NIGHTLY = pytest.mark.nightly


def test_the_process_that_starts_the_others_does_not_import_torch():
    code = "import sys, trainer.distributed.spawn; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def children_of(process, num):
    """The processes that it has started, by rank, once there are so many."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        found = {}
        for child in process.children():
            try:
                found[int(child.environ()["RANK"])] = child
            except (psutil.Error, KeyError):
                continue
        if len(found) == num:
            return found
        time.sleep(0.01)
    raise AssertionError("the processes have not been started")


@pytest.mark.slow
def test_the_main_processes_error_is_printed_once_and_its_status_is_that_of_the_command(
    tmp_path, capfd
):
    status = spawn.start_processes(2, ["rl", str(tmp_path / "missing.toml"), "-o", "run"], "resume")
    assert status == 1
    assert capfd.readouterr().err.count("missing.toml") == 1


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1, 2])
def test_a_killed_process_ends_all_with_one_sentence(killed, tmp_path, monkeypatch):
    """The processes serve a recorder, which would run for ever."""
    monkeypatch.setattr(spawn, "NOTICE_S", 0.1)
    monkeypatch.setattr(spawn, "END_S", 0.1)
    found = {}

    def kill():
        found.update(children_of(psutil.Process(), 3))
        found[killed].kill()

    thread = threading.Thread(target=kill)
    thread.start()
    serve = [
        "record",
        "--upstream",
        "http://127.0.0.1:9",
        "--port",
        "0",
        "-o",
        str(tmp_path / "ds"),
    ]
    with pytest.raises(InputError) as error:
        spawn.start_processes(3, serve, "run it again")
    thread.join()
    assert str(error.value) == (
        f"rank {killed} (of 3 processes): the process was killed by SIGKILL; the others were stopped."
        " [process_lost]"
    )
    assert error.value.hint == "check the free memory, then run it again"
    assert not any(child.is_running() for child in found.values())


def launched(*arguments):
    words = [sys.executable, "-P", "-m", "rollout_io", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, text=True, **pipes)


def wait_for(path, process):
    until = time.monotonic() + 300
    while not path.exists() and time.monotonic() < until and process.poll() is None:
        time.sleep(0.01)
    assert path.exists(), process.communicate()


@pytest.fixture(scope="module")
def toml(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("rl")
    config = config_of(folder, save_model(folder / "model", tokenizer), num_iterations=999)
    (folder / "c.toml").write_text(as_toml(config))
    return folder / "c.toml"


@pytest.mark.slow
@pytest.mark.parametrize("killed", [*(pytest.param(n, marks=NIGHTLY) for n in (0, 1)), None])
def test_a_loop_whose_process_or_starter_is_killed_leaves_nothing_behind(killed, toml, tmp_path):
    out = tmp_path / "run"
    process = launched("rl", str(toml), "--out", str(out), "--num-processes", "2")
    wait_for(out / "weights" / "version_2", process)
    found = children_of(psutil.Process(process.pid), 2)
    if killed is None:
        process.kill()
    else:
        found[killed].kill()
    said = process.communicate(timeout=120)[1]
    _, alive = psutil.wait_procs(found.values(), timeout=30)
    assert not alive
    if killed is None:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 1
        assert said.count("Error: ") == 1
        assert f"Error: rank {killed} (of 2 processes): the process was killed by SIGKILL" in said
        assert f"rollouts rl --resume {out} --num-processes 2" in said
        assert "Traceback" not in said


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_starter_stops_the_loop_as_in_one_process(number, toml, tmp_path):
    out = tmp_path / "run"
    shared = ["--num-processes", "2", "--set", "loop.num_iterations=20"]
    process = launched("rl", str(toml), "--out", str(out), *shared)
    wait_for(out / "weights" / "version_1", process)
    process.send_signal(number)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 130
    assert said.count("stopped: finished work is kept") == 1
    assert "Error" not in said
    assert len(lines_of(out)) < 40
    done = launched("rl", "--resume", str(out), *shared, "--json")
    printed, said = done.communicate(timeout=300)
    assert done.returncode == 0, said
    assert json.loads(printed)["num_iterations"] == 20
    assert len(lines_of(out)) == 40


@pytest.mark.slow
def test_ctrl_c_saves_training_in_two_processes_without_a_traceback(tmp_path):
    dataset = write_dataset(tmp_path / "ds", group_rows(2, (1.0, 0.0)))
    model, out = save_tiny_model(tmp_path / "model"), tmp_path / "run"
    sizes = ["batch.groups_per_batch=2", "batch.groups_per_mini_batch=1", "model.lora_rank=2"]
    given = ["train", dataset, "--model", model, "--out", str(out), "--num-processes", "2"]
    process = launched(*given, *(f"--set={one}" for one in [*sizes, "batch.num_epochs=5000"]))
    wait_for(out / "metrics.jsonl", process)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 130
    assert f"continue with `rollouts train --resume {out} --num-processes 2`" in said
    assert "Traceback" not in said
    assert "Error" not in said
    num_made = len(lines_of(out))
    assert (out / "checkpoints" / f"global_step_{num_made}").is_dir()
    more = ["--num-processes", "2", "--max-updates", str(num_made + 1)]
    printed, said = launched("train", "--resume", str(out), *more).communicate(timeout=120)
    assert f"global_step_{num_made + 1}" in printed, said


@pytest.mark.slow
def test_train_in_two_processes(tmp_path):
    rows = group_rows(4, (1.0, 0.0))
    dataset = write_dataset(tmp_path / "ds", rows)
    model = save_tiny_model(tmp_path / "model")
    metrics = []
    for num in (1, 2):
        out = tmp_path / str(num)
        given = ["train", dataset, "--model", model, "--out", str(out), "-q"]
        sizes = ["--set", "batch.groups_per_batch=2", "--set", "batch.groups_per_mini_batch=2"]
        process = launched(*given, "--num-processes", str(num), *sizes)
        printed, said = process.communicate(timeout=300)
        assert process.returncode == 0, said
        assert "global_step_2" in printed
        metrics.append(lines_of(out))
    changing = {"num_micro_batches"}
    for line, other in zip(*metrics, strict=True):
        for name in line.keys() - changing:
            assert line[name] == pytest.approx(other[name], rel=1e-5, abs=1e-5), name


def test_processes_of_another_launcher_are_not_multiplied(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="in a process that a launcher has started"):
        in_processes(2, "resume")


def test_a_process_whose_starter_was_killed_at_once_does_not_wait_for_the_others(
    tmp_path, monkeypatch
):
    variables = {STORE: str(tmp_path / "store"), STARTER: "1", "WORLD_SIZE": "2", "RANK": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=r"the `rollouts` command was killed\. \[process_lost\]"):
        make_accelerator(train_config(out=str(tmp_path / "run")))
