"""A user's file in the working directory that has the name of one of our packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_io.startup import require_ours
from tests.conftest import ROOT

BIN = Path(sys.executable).parent
MODULE = [sys.executable, "-m", "rollout_io"]
LOUD = "print('imported the wrong one')\n"


def hide(folder, name):
    """Write a module `name`, or a package where the name ends in a slash."""
    path = folder / f"{name}__init__.py" if name.endswith("/") else folder / f"{name}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(LOUD)
    return path


def run(folder, *command):
    # The environment of these tests may not be the checkout's own.
    search = os.pathsep.join([str(folder / "none"), str(ROOT)])
    return subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": search, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )


def check_named(done, file, package):
    assert done.returncode == 1
    assert "imported the wrong one" not in done.stdout
    (line,) = [line for line in done.stderr.splitlines() if str(file) in line]
    assert f"{file} hides the package `{package}` of rollout-io ({ROOT / package})" in line
    assert line == done.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["schemas", "schemas/"])
def test_a_module_run_names_the_file_that_hides_a_package_in_one_line(tmp_path, name):
    file = hide(tmp_path, name)
    done = run(tmp_path, *MODULE, "--version")
    check_named(done, file, "schemas")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["trainer", "trainer/", "pipelines", "pipelines/"])
def test_a_verb_names_the_file_that_hides_its_package_in_one_line(tmp_path, name):
    file = hide(tmp_path, name)
    verb = "stats" if name.startswith("pipelines") else "train"
    done = run(tmp_path, *MODULE, verb, "ds")
    check_named(done, file, name.rstrip("/"))
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_verb_of_another_package_runs_beside_a_hidden_one(tmp_path):
    hide(tmp_path, "trainer/")
    done = run(tmp_path, *MODULE, "formats")
    assert done.returncode == 0
    assert "hides" not in done.stderr


@pytest.mark.parametrize("package", ["rollout_io", "pipelines", "trainer"])
def test_a_plain_import_names_the_file_that_hides_schemas(tmp_path, package):
    file = hide(tmp_path, "schemas")
    check_named(run(tmp_path, sys.executable, "-c", f"import {package}"), file, "schemas")


def test_a_plain_import_of_the_trainer_names_the_file_that_hides_pipelines(tmp_path):
    file = hide(tmp_path, "pipelines")
    check_named(run(tmp_path, sys.executable, "-c", "import trainer"), file, "pipelines")


def test_a_folder_that_is_no_package_hides_nothing(tmp_path):
    (tmp_path / "schemas").mkdir()
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "notes.py").write_text(LOUD)
    done = run(tmp_path, sys.executable, "-c", "import trainer, schemas; print(schemas.COLUMNS[0])")
    assert done.returncode == 0, done.stderr
    assert "wrong" not in done.stdout


def test_names_that_are_not_ours_are_not_checked(tmp_path, monkeypatch):
    hide(tmp_path, "extra_verbs")
    monkeypatch.syspath_prepend(tmp_path)
    require_ours("extra_verbs", "schemas", "rollout_io", "pipelines", "trainer")


LAUNCHED = {
    "rollouts": ["rollouts", "train"],
    "python -P": [sys.executable, "-P", "-m", "rollout_io", "train"],
    "accelerate": ["accelerate", "launch", "--cpu", "--no_python", "rollouts", "train"],
    "torchrun": ["torchrun", "--nproc_per_node", "1", "--no-python", "rollouts", "train"],
}
LAUNCHERS = ("accelerate", "torchrun")  # each imports torch


@pytest.mark.parametrize(
    "how",
    ["rollouts", "python -P", *(pytest.param(h, marks=pytest.mark.slow) for h in LAUNCHERS)],
)
def test_the_documented_launches_do_not_see_the_working_directory(tmp_path, how):
    for name in ("schemas", "trainer/", "pipelines"):
        hide(tmp_path, name)
    done = run(tmp_path, *LAUNCHED[how], "--help")
    assert done.returncode == 0, done.stderr
    assert "rollouts train" in done.stdout
    assert "imported the wrong one" not in done.stdout


@pytest.mark.slow
def test_accelerate_launch_of_the_module_names_the_file(tmp_path):
    file = hide(tmp_path, "trainer/")
    done = run(tmp_path, "accelerate", "launch", "--cpu", "-m", "rollout_io", "train", "ds")
    assert done.returncode
    assert f"{file} hides the package `trainer` of rollout-io" in done.stderr
