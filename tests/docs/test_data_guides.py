"""Each guide about data without training: its commands print what it shows."""

import json
import subprocess
import sys

import pytest

from rollout_io import scan
from tests.conftest import ROOT
from tests.docs.test_guides import commands, printed_by
from tests.helpers.guide_helpers import blocks_of, check_outputs


@pytest.mark.slow
def test_the_guide_to_clean_data_finds_drops_and_orders(smollm2_dir, tmp_path):
    files = {name: code for _, name, code in blocks_of("clean.md") if name}
    for name, code in files.items():
        (tmp_path / name).write_text(code.replace('"runs/', f'"{tmp_path}/'))
    places = {f"runs/{name}": str(tmp_path / name) for name in ("shop", "clean", "medium")}
    places |= {"eval.jsonl": str(tmp_path / "eval.jsonl"), ".cache/smollm2": str(smollm2_dir)}
    shop = ("examples/shop.calls.jsonl", "examples/shop.rewards.jsonl")
    given = list(commands("clean.md", places | {name: str(ROOT / name) for name in shop}))
    check_outputs("clean.md", printed_by(given, places))
    assert "shop-0" not in scan(tmp_path / "clean").collect()["instance_id"]
    tasks = [{"instance_id": f"shop-{n}"} for n in range(12)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    subprocess.run([sys.executable, "order.py"], cwd=tmp_path, check=True)
    ordered = [json.loads(line) for line in (tmp_path / "ordered.jsonl").read_text().splitlines()]
    rates = [task["pass_rate"] for task in ordered]
    assert len(rates) == 12
    assert rates == sorted(rates, reverse=True)


def test_the_guide_to_new_rewards_scores_each_trajectory(tmp_path, monkeypatch):
    for _, name, code in blocks_of("rescore.md"):
        if name:
            (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    places = {f"runs/{name}": str(tmp_path / name) for name in ("shop", "brief")}
    shop = ("examples/shop.calls.jsonl", "examples/shop.rewards.jsonl")
    given = list(commands("rescore.md", places | {name: str(ROOT / name) for name in shop}))
    check_outputs("rescore.md", printed_by(given, places))
    assert set(scan(tmp_path / "brief").collect()["reward"]) == {0.0, 1.0}


@pytest.mark.slow
def test_the_guide_to_findings_runs_its_own_finders(tmp_path, monkeypatch):
    for _, name, code in blocks_of("findings.md"):
        if name:
            (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    places = {"runs/shop": str(tmp_path / "shop")}
    shop = ("examples/shop.calls.jsonl", "examples/shop.rewards.jsonl")
    given = list(commands("findings.md", places | {name: str(ROOT / name) for name in shop}))
    printed_by(given, places)
    names = {path.stem for path in (tmp_path / "shop.findings").glob("*.arrow")}
    assert names == {"loops", "refusals", "hedges", "failing"}


def test_the_guide_to_differences_finds_the_planted_reward_hacking(tmp_path):
    (code,) = [code for _, name, code in blocks_of("diff.md") if name == "planted.py"]
    places = {f"runs/{name}": str(tmp_path / name) for name in ("shop", "short", "hacked")}
    shop = ("examples/shop.calls.jsonl", "examples/shop.rewards.jsonl")
    given = list(commands("diff.md", places | {name: str(ROOT / name) for name in shop}))
    printed = printed_by(given[:3], places)
    (tmp_path / "planted.py").write_text(code.replace('"runs/', f'"{tmp_path}/'))
    subprocess.run([sys.executable, "planted.py"], cwd=tmp_path, check=True)
    check_outputs("diff.md", printed + printed_by(given[3:], places))
