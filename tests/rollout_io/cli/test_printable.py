"""No text of a log or a file name reaches a terminal as a control sequence."""

import ast
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_io.cli import output
from rollout_io.cli.main import run
from rollout_io.terminal import console, printable, printable_styles
from schemas.metadata import DatasetMetadata
from tests.conftest import ROOT
from tests.helpers.table_helpers import write_example

EVIL = "\x1b[2J\x1b]0;owned\x07\u202e\u2066\x9b31m\x00\r\x08"
BAD = set("\x1b\x07\u202e\u2066\x9b\x00\r\x08")
PLACES = ("rollout_io/cli/output.py", "rollout_io/cli/output.py")


@pytest.mark.slow
def test_all_text_is_printed_in_one_place():
    found = []
    for package in ("rollout_io", "pipelines", "trainer", "schemas"):
        for path in (ROOT / package).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            if name in PLACES:
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                if called in {"print", "click.echo", "click.secho", "Console", "rich.print"}:
                    found.append(f"{name}:{node.lineno} {called}")
                if called.startswith(("sys.stdout.write", "sys.stderr.write")):
                    found.append(f"{name}:{node.lineno} {called}")
    assert found == []


@pytest.mark.parametrize(
    "show", ["emit", "emit_styled", "say", "note", "note_styled", "warn", "emit_json"]
)
def test_nothing_that_prints_lets_a_control_sequence_through(capsys, show):
    getattr(output, show)(f"a{EVIL}b")
    captured = capsys.readouterr()
    text = captured.out + captured.err
    assert "a" in text
    assert not BAD & set(text)


@given(st.text())
def test_printable_text_has_only_printable_characters_and_stays_what_it_is(text):
    once = printable(text)
    assert all(c.isprintable() or c in "\n\t" for c in once)
    assert printable(once) == once


def test_styles_of_ours_stay_and_nothing_else_that_escapes():
    assert printable_styles("\x1b[1;32mok\x1b[0m") == "\x1b[1;32mok\x1b[0m"
    assert printable_styles("\x1b[2J\x1b[1mx") == "\\x1b[2J\x1b[1mx"


def test_a_console_escapes_what_it_draws():
    from rich.table import Table
    from rich.text import Text

    table = Table()
    table.add_column(EVIL)
    table.add_row(Text(EVIL, style="bold"))
    file = io.StringIO()
    console(file=file, force_terminal=True, width=200).print(table)
    assert not (BAD - {"\x1b"}) & set(file.getvalue())
    assert "\x1b[2J" not in file.getvalue()
    assert "[2J" in file.getvalue()


VERBS = [
    ["stats", "DS", "--all"],
    ["stats", "DS"],
    ["stats", "DS", "DS"],
    ["drift", "DS"],
    ["validate", "DS"],
    ["inspect", "DS"],
    ["export", "DS", "--format", "skyrl", "--out", "OUT.json"],
    ["filter", "DS", "--where", "reward > -1", "--out", "OUT"],
    ["merge", "DS", "--out", "OUT"],
    ["formats", EVIL],
    ["convert", f"x{EVIL}.jsonl".replace("\x00", ""), "--out", "OUT"],
    [f"verb{EVIL}"],
    ["stats", f"--{EVIL}"],
    ["stats", f"DS{EVIL}"],
    ["filter", "DS", "--where", f"agent = '{EVIL}' AND", "--out", "OUT"],
]


@pytest.mark.parametrize("words", VERBS, ids=lambda words: repr(words[0] + words[-1])[:30])
def test_no_verb_prints_control_sequences_of_a_dataset_or_an_argument(tmp_path, capsys, words):
    ds = write_hostile(tmp_path / "ds")
    run([w.replace("DS", str(ds)).replace("OUT", str(tmp_path / "out")) for w in words])
    captured = capsys.readouterr()
    text = captured.out + captured.err
    assert text
    assert not BAD & set(text), sorted(BAD & set(text))


def write_hostile(path):
    """A dataset whose names, texts, columns and metadata are hostile."""
    import rollout_io

    source = write_example(path.with_name("source"))
    table = rollout_io.read(source)
    evil = EVIL.replace("\x00", "")
    for name in ("stop_reason", "agent", "error_note", f"col{evil}"):
        column = [evil] * table.num_rows
        if name in table.column_names:
            table = table.set_column(table.column_names.index(name), name, [column])
        else:
            table = table.append_column(name, [column])
    ids = [f"{evil}{text}" for text in table["instance_id"].to_pylist()]
    repetitions = table["repetition_id"].to_pylist()
    at = table.column_names.index
    table = table.set_column(at("instance_id"), "instance_id", [ids])
    names = [f"{i}_{r}" for i, r in zip(ids, repetitions, strict=True)]
    table = table.set_column(at("trajectory_id"), "trajectory_id", [names])
    metadata = DatasetMetadata(models=(f"model{evil}",), tokenizer=f"tok{evil}")
    with rollout_io.RolloutWriter(path, metadata=metadata) as writer:
        writer.write(table)
    return path
