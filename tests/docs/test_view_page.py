"""The commands of the viewer's page make the run that it explains."""

import re
import shlex
from pathlib import Path

import pytest

from rollout_io import scan
from rollout_io.cli.main import run
from tests.conftest import ROOT

SECTION = (ROOT / "docs" / "view.md").read_text().partition("## Why did a task not improve?")[2]


@pytest.fixture(scope="module")
def commands():
    """The words of each command, by verb."""
    (block,) = re.findall(r"```sh\n(.*?)```", SECTION.partition("\n## ")[0], re.DOTALL)
    lines = block.replace("\\\n", " ").splitlines()
    return {words[1]: words[1:] for words in map(shlex.split, lines)}


def placed(words, folder):
    """The words, with the page's paths in a folder."""
    inputs = {name: str(ROOT / name) for name in words if name.startswith((".cache", "examples"))}
    outputs = {name: str(folder / Path(name).name) for name in words if name.startswith("runs/")}
    return [(inputs | outputs).get(word, word) for word in words]


@pytest.fixture(scope="module")
def folder(commands, tmp_path_factory):
    """Where the page's first command has written its dataset."""
    folder = tmp_path_factory.mktemp("page")
    assert run(placed(commands["convert"], folder)) == 0
    return folder


def test_the_commands_lead_from_one_to_the_next(commands, folder, capsys):
    convert, train, view = commands["convert"], commands["train"], commands["view"]
    assert train[1] == convert[convert.index("--out") + 1]
    assert view[1] == train[train.index("--out") + 1]
    (task,) = set(re.findall(r"instance_id = '(.*?)'", SECTION))
    assert task in scan(folder / "why-shop").collect()["instance_id"]
    assert run([*placed(train, folder), "--show-config"]) == 0
    shown = capsys.readouterr().out
    assert {'record_tokens = "all"', "max_updates = 6"} <= {
        line.partition("  #")[0].rstrip() for line in shown.splitlines()
    }


@pytest.mark.slow
@pytest.mark.model
def test_the_plan_of_the_run_stands(commands, folder, smollm2_dir):
    del smollm2_dir
    assert run([*placed(commands["train"], folder), "--dry-run"]) == 0
