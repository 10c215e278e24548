"""The guide "Look at logs": its commands open the logs, its filters select, its report is written."""

import re
import shlex

import pytest

from pipelines.view.paths import kind_of_path
from rollout_io.cli.main import run
from tests.conftest import ROOT
from tests.helpers.log_view_helpers import log_of
from tests.helpers.view_helpers import Asked, bundle_in

PAGE = (ROOT / "docs" / "guides" / "look.md").read_text()
LINES = "".join(re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)).splitlines()
COMMANDS = [shlex.split(line)[1:] for line in LINES]
FILTERS = "".join(re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)).splitlines()


@pytest.fixture
def ask(monkeypatch):
    """The logs of the guide."""
    monkeypatch.chdir(ROOT)
    return Asked(COMMANDS[0][1])


def test_the_first_command_opens_logs_with_calls_and_thinking(ask):
    assert kind_of_path(COMMANDS[0][1]) == "log"
    lines = ask("/api/datasets/d0/trajectories")
    assert lines["format"].unique().to_list() == ["claude_code"]
    assert lines["num_tool_calls"].max() > 0
    assert log_of(ask)["command"].startswith(
        "rollouts convert examples/claude_code/ --tokenizer DIR"
    )
    kinds = set()
    for name in lines["trajectory_id"]:
        told = ask("/api/datasets/d0/conversation", trajectory_id=name)
        kinds |= {p["type"] for lane in told["lanes"] for t in lane["turns"] for p in t["parts"]}
    assert {"text", "tool_call", "tool_result"} <= kinds


@pytest.mark.parametrize("where", FILTERS)
def test_each_filter_is_a_condition_on_logs(ask, where):
    assert len(ask("/api/datasets/d0/trajectories", where=where)) <= 3


def test_the_last_command_writes_a_report(ask, tmp_path, monkeypatch, capsys):
    bundle = bundle_in(tmp_path / "bundle")
    monkeypatch.setattr("pipelines.view.app.Bundle.read", lambda: bundle)
    *words, out = COMMANDS[-1]
    assert run([*words, str(tmp_path / out)]) == 0
    number = len(ask("/api/datasets/d0/trajectories", where="num_tool_calls > 0"))
    assert f"{number} trajector" in capsys.readouterr().err
    assert (tmp_path / out).stat().st_size > 1000
