"""The stories of docs/audit.md can be followed, and end as they say."""

import json
import re

import pytest

from rollout_io.cli.main import run
from tests.conftest import ROOT
from tests.helpers.guide_helpers import follow, text_of

PAGE = "../audit.md"
ENGINE = "Two stories: a stale server, and shifted log-probabilities"
UPDATE = "The row that blew up the step"
NUMBER = r"-?\d[\d,]*\.?\d*"


@pytest.mark.nightly  # tests/vllm/test_audit.py finds a stale vLLM server on every change
@pytest.mark.model
def test_the_stale_server_and_the_shifted_logprobs_are_found(smollm2_dir, tmp_path):
    del smollm2_dir
    printed = " ".join(follow(PAGE, tmp_path, part=ENGINE).split())
    assert (
        "8 of 16 spans labelled 3 were sampled by version 1: one of several servers is stale"
        in printed
    )
    assert printed.count("exit code 1") == 2
    assert (
        "In 6 spans, each log-probability belongs to the next token: the list is shifted" in printed
    )


@pytest.mark.nightly  # tests/trainer/forensics/ blames and replays updates on every change
@pytest.mark.model
def test_the_row_that_blew_up_the_step_is_found(smollm2_dir, tmp_path, monkeypatch, capsys):
    """Up to the last digit of a printed number, which may differ between processors."""
    del smollm2_dir
    page = text_of(PAGE, UPDATE)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    follow(PAGE, tmp_path, part=UPDATE)
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    (told,) = re.findall(r"in `run/metrics.jsonl` is ([\d., and]+)\.", page)
    norms = [json.loads(line)["grad_norm"] for line in lines]
    assert norms == pytest.approx(numbers(told), rel=0.02)

    monkeypatch.chdir(tmp_path)
    command, shown = re.search(r"\$ rollouts (blame [^\n]*)\n(.*?)```", page, re.DOTALL).groups()
    capsys.readouterr()
    assert run(command.split()) == 0
    printed = capsys.readouterr().out
    assert re.sub(NUMBER, "#", printed).split() == re.sub(NUMBER, "#", shown).split()
    assert numbers(printed) == pytest.approx(numbers(shown), rel=0.02, abs=0.1)

    replay = r"`rollouts (replay [^`]*)`.*?`grad_norm` ([\d.]+)"
    command, told = re.search(replay, page, re.DOTALL).groups()
    assert run([*command.split(), "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert metrics["grad_norm"]["changed"] == pytest.approx(float(told), rel=0.02)


def numbers(text):
    return [float(number.replace(",", "")) for number in re.findall(NUMBER, text)]
