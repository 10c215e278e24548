"""Options that every verb has, and completion in bash."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_io.cli.main import GROUP, ORDER, SECTIONS, rollouts, run
from rollout_io.plugins import plugins
from rollout_io.terminal import is_quiet
from tests.conftest import EXAMPLES

SHOP = str(EXAMPLES / "shop.calls.jsonl")
WITHOUT_OUT = {"formats", "validate", "inspect", "stats", "drift", "rescore", "diff"}


@pytest.mark.parametrize("verb", sorted(entry.name for entry in plugins(GROUP)))
def test_every_verb_has_the_common_options(verb):
    context = rollouts.make_context("rollouts", [], resilient_parsing=True)
    command = rollouts.get_command(context, verb)
    assert command is rollouts.get_command(context, verb)
    names = [name for param in command.params for name in param.opts]
    assert len(names) == len(set(names))
    assert {"-q", "--quiet", "-v", "--verbose"} <= set(names)
    assert ("-o" in names) == ("--out" in names) == (verb not in WITHOUT_OUT)


def test_quiet_hides_notes_and_keeps_errors(tmp_path, capsys):
    assert run(["convert", SHOP, "-o", str(tmp_path / "ds"), "-q"]) == 0
    assert capsys.readouterr() == ("", "")
    assert run(["stats", str(tmp_path / "ds"), "--quiet"]) == 0
    printed = capsys.readouterr()
    assert "205 rows" in printed.out
    assert printed.err == ""
    assert run(["stats", str(tmp_path / "nowhere"), "-q"]) == 1
    assert "[dataset_exists]" in capsys.readouterr().err
    assert run(["stats", "-q"]) == 2
    assert not is_quiet()
    assert run(["stats", str(tmp_path / "ds")]) == 0
    assert "--all" in capsys.readouterr().err


def test_quiet_keeps_the_warning_of_rejected_records(tmp_path, capsys):
    log, out = tmp_path / "log.jsonl", tmp_path / "ds"
    log.write_bytes(Path(SHOP).read_bytes() + b"{}\n")
    command = ["convert", str(log), "-o", str(out), "--on-error", "skip", "-q"]
    assert run(command) == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == (
        "",
        f"warning: 1 record rejected: see {out}.rejected.jsonl\n",
    )


def test_verbose_prints_debug_messages(tmp_path, capsys):
    assert run(["convert", SHOP, "-o", str(tmp_path / "ds"), "-q"]) == 0
    assert run(["stats", str(tmp_path / "ds"), "-v"]) == 0
    assert "1 shard, 1 process (local)" in capsys.readouterr().err
    assert run(["stats", str(tmp_path / "ds")]) == 0
    assert "1 shard" not in capsys.readouterr().err
    assert not logging.getLogger("rollout_io").handlers


def test_short_version(capsys):
    assert run(["-V"]) == run(["--version"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("rollouts st", "plain,stats"),
        ("rollouts stats --js", "plain,--json"),
        ("rollouts convert logs/ --on-error s", "plain,skip"),
        ("rollouts stats runs/s", "file,runs/s"),
    ],
)
def test_bash_completes_verbs_options_values_and_paths(words, expected):
    position = str(len(words.split()) - 1)
    complete = {"COMP_WORDS": words, "COMP_CWORD": position, "_ROLLOUTS_COMPLETE": "bash_complete"}
    command = [sys.executable, "-c", "from rollout_io.cli.main import main; main()"]
    done = subprocess.run(
        command, env=os.environ | complete, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [expected]


def test_bash_can_source_the_completion():
    command = [sys.executable, "-c", "from rollout_io.cli.main import main; main()"]
    env = os.environ | {"_ROLLOUTS_COMPLETE": "bash_source"}
    script = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    done = subprocess.run(["bash", "-n"], input=script, text=True, check=True, capture_output=True)
    assert (done.stdout, done.stderr) == ("", "")
    assert "_ROLLOUTS_COMPLETE=bash_complete" in script
    assert (
        'eval "$(_ROLLOUTS_COMPLETE=bash_source rollouts)"' in Path("docs/install.md").read_text()
    )


def test_a_real_bash_completes_a_verb_after_the_line_of_the_readme(tmp_path):
    (line,) = [x for x in Path("docs/install.md").read_text().splitlines() if "=bash_source" in x]
    program = tmp_path / "rollouts"
    main = "from rollout_io.cli.main import main; main()"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{main}" "$@"\n')
    program.chmod(0o755)
    ask = "COMP_WORDS=(rollouts st) COMP_CWORD=1; _rollouts_completion rollouts"
    script = f'{line}\ncomplete -p rollouts\n{ask}\necho "${{COMPREPLY[@]}}"\n'
    env = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[1:] == ["stats"]
    assert done.stderr == ""


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_readme_has_a_line_for_each_shell(shell):
    (line,) = [
        x for x in Path("docs/install.md").read_text().splitlines() if f"={shell}_source" in x
    ]
    env = os.environ | {"_ROLLOUTS_COMPLETE": f"{shell}_source"}
    command = [sys.executable, "-c", "from rollout_io.cli.main import main; main()"]
    script = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert f"_ROLLOUTS_COMPLETE={shell}_complete" in script
    assert line.startswith("    ")


def test_help_lists_every_verb_in_a_section_with_one_line(capsys):
    assert run(["--help"]) == 0
    printed = capsys.readouterr().out
    installed = {entry.name for entry in plugins(GROUP)}
    for title, verbs in SECTIONS.items():
        lines = printed.partition(f"\n{title}:\n")[2].partition("\n\n")[0].splitlines()
        shown = [line.split()[0] for line in lines]
        assert shown == [verb for verb in verbs if verb in installed]
        assert all(line.endswith(".") for line in lines)
    assert installed <= set(ORDER)
