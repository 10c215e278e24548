"""Every real log is converted, or refused for a named reason; docs/formats/real_logs.md says which."""

import runpy
import sys

import pytest

from tests.conftest import ROOT
from tests.helpers.qwen import chat_template_of, save_qwen3

pytestmark = pytest.mark.slow  # test_source_is_kept.py converts the same logs


@pytest.fixture(scope="module")
def table(harness_logs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    save_qwen3(folder, chat_template_of("qwen3"))
    made = runpy.run_path(str(ROOT / "docs" / "real_logs.py"))["real_logs_table"]
    return made(harness_logs.resolve(), folder)


def test_what_becomes_of_every_real_log_is_what_the_page_says(table, capsys):
    with capsys.disabled():
        sys.stdout.write(f"\n{table}\n")
    assert table in (ROOT / "docs" / "formats" / "real_logs.md").read_text(encoding="utf-8")


def test_every_real_log_gives_rows_or_a_named_reason(table, harness_logs):
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    folders = [
        harness_logs,
        *(harness_logs.parent / n for n in ("harness_logs_2026", "agent_traces")),
    ]
    made = runpy.run_path(str(ROOT / "docs" / "real_logs.py"))
    files = [p for folder in folders for p in made["files_in"](folder)]
    assert len(rows) == len(files) > 50
    for _, _, records, trajectories, num_rows, tokens, reasons in rows:
        assert (int(num_rows) > 0) == (int(trajectories) > 0) == (tokens != "-")
        assert int(num_rows) or reasons.count("`") >= 2
        assert records == "-" or int(records) > 0
