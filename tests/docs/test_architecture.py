"""The files and symbols on the architecture page exist, and its examples run."""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
import textwrap
import types
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import rollout_io
from rollout_io.cli.main import run
from schemas import RULES, breakers, check, row_checks
from schemas.rules import FINDINGS, findings_of, rules_of
from schemas.strategies import broken_tables, rollout_tables
from tests.conftest import ROOT
from tests.helpers.adapter_helpers import read_all, write_lines
from tests.helpers.configs import train_config
from tests.helpers.losses_helpers import policy_loss
from trainer.algorithms.losses import Targets
from trainer.config.functions import POLICY_LOSS, bind

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FILES = sorted(set(re.findall(r"`((?:[\w.]+/)+(?:\w+\.\w+)?|\w+\.toml)`", PAGE)))
SYMBOLS = re.findall(r"^\| `(\S+\.py)` \| `(\w+)` \|", PAGE, re.MULTILINE)
IN_SENTENCES = re.findall(r"`(\w+)` \(`(\S+\.py)`\)", PAGE) + re.findall(
    r"`(\w+)`,? in `(\S+\.py)`", PAGE
)


def block(kind: str, start: str) -> str:
    """The code block of a kind whose text begins so, without its indentation."""
    blocks = re.findall(rf"^ *```{kind}\n(.*?)^ *```", PAGE, re.DOTALL | re.MULTILINE)
    (found,) = (text for b in blocks if (text := textwrap.dedent(b)).startswith(start))
    return found


def names_in(file: str) -> set[str]:
    """The functions, classes and constants at the top of a module."""
    names = set()
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def test_every_file_and_folder_of_the_page_exists() -> None:
    assert len(FILES) > 50
    for name in FILES:
        if "NAME" not in name:
            found = [*ROOT.glob(name), *ROOT.glob(f"*/{name}"), *ROOT.glob(f"*/*/{name}")]
            assert found, name


def test_every_symbol_of_the_page_is_in_its_file() -> None:
    pairs = SYMBOLS + [(file, symbol) for symbol, file in IN_SENTENCES]
    assert len(pairs) > 25
    for file, symbol in pairs:
        assert symbol in names_in(file), f"{symbol} is not in {file}"


def test_every_folder_of_the_packages_is_on_the_map() -> None:
    folders = {
        f"{path.parent.relative_to(ROOT).as_posix()}/"
        for package in ("rollout_io", "pipelines", "trainer")
        for path in (ROOT / package).glob("*/__init__.py")
    } - {"pipelines/cli/", "trainer/cli/"}
    assert folders <= set(FILES)


def test_the_format_of_the_page_is_detected_and_converted(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "my_formats.py").write_text(block("python", "# my_formats.py"))
    installed = tmp_path / "my_formats-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my-formats\nVersion: 1.0\n")
    toml = block("toml", '[project.entry-points."rollout_io.formats"]')
    (name,) = re.findall(r"^(\w+) = ", toml, re.MULTILINE)
    (installed / "entry_points.txt").write_text(
        f"[rollout_io.formats]\n{name} = my_formats:ADAPTER\n"
    )
    assert "my_formats:ADAPTER" in toml
    log = tmp_path / "log.jsonl"
    log.write_text(block("json", '{"task"'))
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    try:
        assert run(["formats", str(log)]) == 0
        assert f"{name} (6 of 6 keys known)" in capsys.readouterr().out
        assert run(["convert", str(log), "--out", str(tmp_path / "ds")]) == 0
    finally:
        sys.modules.pop("my_formats", None)
    (row,) = rollout_io.read(tmp_path / "ds").to_pylist()
    line = json.loads(log.read_text())
    assert (row["trajectory_id"], row["reward"]) == ("sum_0", 1.0)
    assert (row["prompt_token_ids"], row["response_ids"]) == (line["prompt"], line["response"])


def test_the_sessions_of_the_page_go_back_and_are_compacted_in_few_lines(tmp_path) -> None:
    source = block("python", "# my_agent.py")
    assert len(source.splitlines()) <= 100
    module = types.ModuleType("my_agent")
    sys.modules["my_agent"] = module
    try:
        exec(source, module.__dict__)
    finally:
        sys.modules.pop("my_agent", None)
    names = vars(module)
    lines = [
        {"type": "head", "session": "s"},
        {"type": "message", "id": "1", "text": "Hi."},
        {"type": "message", "id": "2", "after": "1", "role": "assistant", "text": "Ho."},
        {
            "type": "message",
            "id": "3",
            "after": "1",
            "role": "assistant",
            "text": "Hm.",
            "mood": "a b",
        },
        {"type": "summary", "text": "They met."},
        {"type": "message", "id": "4", "text": "On."},
        {"type": "message", "id": "5", "after": "4", "role": "assistant", "text": "Yes."},
    ]
    path = write_lines(tmp_path / "s.jsonl", *lines)
    ((run_, found),), _ = read_all(names["ADAPTER"], path)
    texts = [[message["content"] for message in step.messages] for step in found.steps]
    assert texts == [["Hi.", "Ho."], ["Hi.", "Hm."], ["They met.", "On.", "Yes."]]
    assert (run_.instance_id, found.unread) == ("s", {"message.mood": 1})


@pytest.fixture
def invariant(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the page's rule, added as the page says."""
    source = [
        block("python", "def check_policy_version"),
        "entry = {" + block("python", '"policy_version_nonnegative": in') + "}",
    ]
    names: dict[str, Any] = vars(row_checks) | vars(breakers)
    exec("\n".join(source), names)
    ((rule, declared),) = rules_of(block("text", "policy_version_nonnegative | error")).items()
    monkeypatch.setitem(RULES, rule, declared)
    findings = findings_of(block("text", "policy_version_nonnegative | {version}"))
    monkeypatch.setitem(FINDINGS, rule, findings[rule])
    monkeypatch.setitem(breakers.BREAKERS, rule, names["entry"][rule])
    extended = (*row_checks.ROW_CHECKS, names["check_policy_version"])
    monkeypatch.setattr("schemas.checker.ROW_CHECKS", extended)
    return rule


def test_the_invariant_of_the_page_can_be_broken_alone(invariant: str) -> None:
    @given(broken_tables(invariant))
    @settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=5)
    def breaks(table: pa.Table) -> None:
        assert set(check(table)["rule"]) == {invariant}

    @given(rollout_tables())
    @settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=5)
    def accepts(table: pa.Table) -> None:
        assert check(table).is_empty()

    breaks()
    accepts()


def test_the_loss_of_the_page_is_found_with_its_key(tmp_path, monkeypatch) -> None:
    (tmp_path / "my_losses.py").write_text(block("python", "# my_losses.py"))
    monkeypatch.syspath_prepend(str(tmp_path))
    settings_ = {"policy_loss_type": "my_losses:hinge", "loss_own": {"margin": 0.5}}
    config = train_config(dataset="d", model="m", out="o", **settings_)
    values = torch.tensor([-1.0, -2.0], requires_grad=True)
    known = {"old_logprobs": values.detach(), "rollout_logprobs": values.detach()}
    known |= {"row": torch.zeros(2, dtype=torch.int64), "selected": torch.ones(2, dtype=torch.bool)}
    try:
        losses = policy_loss(
            Targets(logprobs=values, advantages=torch.tensor([1.0, -2.0]), **known),
            bind(POLICY_LOSS, config.loss),
        ).losses
    finally:
        sys.modules.pop("my_losses", None)
    assert losses.tolist() == [-1.0, 2.0]
