"""A report in one file answers from disk, without a network, what the server answers."""

import pytest

from pipelines import scan_token_records
from tests.browser.conftest import export, tab_at, viewer

TABLES = {
    "table?sort=response_tokens": "Trajectories",
    "group?task=shop-7&update=none": "Attempts",
    "tree?task=shop-7&update=none": "Nodes",
    "update?update=2": "Rows of the update",
    "run": "Last values",
}
CONVERSATION = "conversation?trajectory=shop-4_1&task=shop-4"


@pytest.fixture(scope="module")
def report(run, smollm2_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "report.html"
    return export(out, run, "--tokenizer", smollm2_dir)


def tokens_of(run):
    """The address of a row that the second update trained on."""
    row = scan_token_records(run, 2).collect().row(0, named=True)
    place = "tokens?trajectory={trajectory_id}&task={instance_id}&step={step_index}&update=2&at=60"
    return place.format_map(row)


def answers(tab, run):
    """Return the rows in sight of each table, and the text of the other views."""
    found = {}
    for place, label in TABLES.items():
        tab.open(place)
        tab.page.eval_on_selector_all("details", "all => all.forEach(one => { one.open = true })")
        found[place] = tab.table(label)
        assert found[place]
    for place in (CONVERSATION, tokens_of(run)):
        tab.open(place)
        found[place] = tab.text("main")
    return found


def test_a_report_answers_from_disk_what_the_server_answers(browser, report, run, smollm2_dir):
    with tab_at(browser, report.as_uri(), offline=True) as tab:
        from_disk = answers(tab, run)
    with (
        viewer(run, "--tokenizer", smollm2_dir) as address,
        tab_at(browser, address) as tab,
    ):
        served = answers(tab, run)
    for place, label in TABLES.items():
        in_both = from_disk[place].keys() & served[place].keys()
        assert len(in_both) >= min(len(served[place]), 10), label
        assert all(from_disk[place][row] == served[place][row] for row in in_both)
    for place in from_disk.keys() - TABLES.keys():
        assert from_disk[place] == served[place]


def test_a_report_sorts_by_itself_and_says_what_needs_the_server(browser, report):
    with tab_at(browser, report.as_uri(), offline=True) as tab:
        tab.open("table")
        tab.page.click("th >> text=response")
        tab.settle()
        column = tab.values("tbody [data-name=response_tokens]")
        assert column == sorted(column, key=float, reverse=True)
        assert tab.page.is_disabled("#where")
        assert "needs" in tab.page.get_attribute("#where", "placeholder")


def test_a_report_of_a_filter_says_so(browser, shop, tmp_path):
    out = export(tmp_path / "wins.html", shop, "--where", "reward > 0")
    with tab_at(browser, out.as_uri(), offline=True) as tab:
        tab.open("table")
        assert "reward > 0" in tab.text(".counts")
        assert {"1"} == set(tab.values("tbody [data-name=return]"))
