"""A poisoned row is among the first three, in a reduced form of benchmarks/blame.py."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import blame


@pytest.mark.nightly
def test_a_poisoned_row_is_among_the_first_three(
    smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert smollm2_dir.is_dir()
    arguments = ["--updates", "6", "--most-rows", "96", "--tune", "60", "--pool", "32", "--json"]
    monkeypatch.setattr(sys, "argv", ["blame", *arguments])
    blame.main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    for kind in blame.KINDS:
        assert figures[kind]["first_three"] == figures[kind]["updates"] == 2
