import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import rollout_io
from rollout_io.cli.main import run
from schemas import RULES
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()
WALKS = {"README.md": README} | {
    name: (ROOT / "docs" / name).read_text() for name in ("index.md", "tour.md")
}
INSTALLS = re.compile(r"^(python3 -m venv|pip install) .*\n", re.MULTILINE)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize(
    "model", ["narrow_smollm2", pytest.param("smollm2_dir", marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("page", WALKS)
def test_the_commands_of_the_readme_the_first_page_and_the_tour_run_one_after_the_other(
    page, model, request, tmp_path
):
    blocks = re.findall(r"```(sh|python)\n(.*?)```", WALKS[page], re.DOTALL)
    blocks = [(kind, INSTALLS.sub("", text)) for kind, text in blocks]
    commands = [(kind, text) for kind, text in blocks if not text.startswith("make ")]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "smollm2").symlink_to(request.getfixturevalue(model))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    assert len(commands) >= 2
    # Hypothesis has no deadline on CI: an example may be slow here, where others run beside it.
    environment = os.environ | {"PATH": path, "CI": "true"}
    for kind, text in commands:
        command = ["bash", "-ec", text] if kind == "sh" else [sys.executable, "-c", text]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    if model == "smollm2_dir":  # random weights prefer nothing
        compare = [str(ROOT / "examples" / "compare_policies.py"), "runs/solvable"]
        command = [sys.executable, *compare, ".cache/smollm2", "runs/first"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert "rewarded trajectories gained on unrewarded ones in" in done.stdout, done.stderr


def test_the_readme_counts_the_invariants_right():
    assert f"{len(RULES)} [named invariants]" in README


def examples_of_formats(folder):
    """Write the example lines of the pages of formats as `NAME.jsonl`, and return its text."""
    pages = ("formats.md", "formats/calls.md")
    page = "".join((ROOT / "docs" / name).read_text() for name in pages)
    blocks = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    for name, block in zip(("attempts", "calls", "rewards"), blocks, strict=True):
        (folder / f"{name}.jsonl").write_text(" ".join(block.split()))
    return page


def test_the_first_example_of_the_formats_converts_with_its_command(
    tmp_path, smollm2_dir, monkeypatch, capsys
):
    page = examples_of_formats(tmp_path)
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall(r"```sh\nrollouts (convert attempts.*?)\n```", page)
    assert run(command.replace(" DIR", f" {smollm2_dir}").split()) == 0
    row = rollout_io.scan(tmp_path / "DS").collect().row(0, named=True)
    assert (row["instance_id"], row["reward"], len(row["segments"])) == ("shop-1", 1.0, 2)
    assert '"name":"price"' in row["messages"]
    assert "warning" not in capsys.readouterr().err


def test_the_example_lines_of_the_calls_format_convert(tmp_path):
    examples_of_formats(tmp_path)
    arguments = ["--rewards", str(tmp_path / "rewards.jsonl"), "--out", str(tmp_path / "ds")]
    assert run(["convert", str(tmp_path / "calls.jsonl"), *arguments]) == 0


def test_every_make_target_the_readme_names_exists():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z]+)$|`make ([a-z]+)`", README, re.MULTILINE))
    assert {first or second for first, second in named} <= targets


@pytest.mark.slow
def test_generated_pages_are_what_the_code_says():
    pages = runpy.run_path(str(ROOT / "docs" / "generate.py"))["PAGES"]
    assert pages
    for name, page in pages.items():
        assert (ROOT / "docs" / name).read_text() == page(), "run `make docs`"


@pytest.mark.slow
@pytest.mark.model
def test_every_output_of_the_afternoon_is_what_its_code_shows(tmp_path, smollm2_dir):
    del smollm2_dir
    for name in ("examples", ".cache"):
        (tmp_path / name).symlink_to(ROOT / name)
    page = ROOT / "examples" / "afternoon.md"
    copy = tmp_path / page.name
    copy.write_text(page.read_text())
    command = [sys.executable, str(ROOT / "docs" / "notebook.py"), copy.name]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert copy.read_text() == page.read_text(), "run `make docs`"
    assert copy.read_text().count("```text") == 10


PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")])


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            linked = page.parent / path if path else page
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), target
