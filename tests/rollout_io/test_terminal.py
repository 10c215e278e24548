import os
import pty
import select
import subprocess
import sys

from rollout_io.terminal import Bar, columns, four_digits

USES = "import sys, rollout_io.cli.output, rollout_io.terminal; print('rich' in sys.modules)"


def shown_on_a_terminal(monkeypatch, action):
    """What an action shows while stderr is a terminal."""
    for name, value in {"TERM": "xterm", "COLUMNS": "100", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as file:
        with monkeypatch.context() as patch:
            patch.setattr("sys.stderr", file)
            action()
        file.flush()
        found = b""
        while select.select([master], [], [], 0)[0]:
            found += os.read(master, 1 << 16)
    os.close(master)
    return found.decode()


def test_a_bar_is_drawn_on_a_terminal_and_texts_appear_above_it(monkeypatch):
    def action():
        with Bar(4, "rows", "merge", done=1) as bar:
            assert bar.is_shown
            bar.update(1, "2 [bold]groups[/bold]")
            sys.stderr.write("warning: one\n")
            bar.update(2)

    shown = shown_on_a_terminal(monkeypatch, action)
    assert "merge" in shown
    assert "4/4 rows" in shown
    assert "2 [bold]groups[/bold]" in shown
    assert "warning: one" in shown


def test_a_bar_of_bytes_has_units(monkeypatch):
    def action():
        with Bar(2_000_000, "B", "convert") as bar:
            bar.update(1_000_000)

    assert "1.0/2.0 MB" in shown_on_a_terminal(monkeypatch, action)


def test_a_bar_that_is_not_wanted_is_not_shown(monkeypatch):
    def action():
        with Bar(4, "rows", shows=False) as bar:
            bar.update(4, "done")

    assert shown_on_a_terminal(monkeypatch, action) == ""


def test_nothing_is_shown_where_stderr_is_no_terminal(capsys):
    with Bar(4, "rows") as bar:
        bar.update(4, "done")
    assert not bar.is_shown
    assert capsys.readouterr() == ("", "")


def test_rich_is_imported_for_a_terminal_alone():
    done = subprocess.run([sys.executable, "-c", USES], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_columns_are_aligned_the_first_to_the_left():
    table = [["layout", "tokens", "of step"], ["merge_consecutive", "8", "100.0%"]]
    assert columns(table) == [
        "layout             tokens  of step",
        "merge_consecutive       8   100.0%",
    ]


def test_a_number_has_four_digits_or_all_before_the_point():
    numbers = (0.12345, 999.96, 14141.5, -1234.5, 1e20)
    assert [four_digits(n) for n in numbers] == ["0.1235", "1,000", "14,142", "-1,234", "1e+20"]
    assert [four_digits(n, "+") for n in (2.5, -2.5)] == ["+2.5", "-2.5"]
