"""A report in one file answers from disk, without a network, what the server answers."""

import numpy as np
import pytest

from pipelines import scan_token_records
from rollout_io import scan
from tests.browser.conftest import export, tab_at, viewer
from tests.helpers.report_helpers import NUM_PROMPT, large_run

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
        assert "rollouts view" in tab.page.get_attribute("#where", "placeholder")


def test_a_report_of_a_filter_says_so(browser, shop, tmp_path):
    out = export(tmp_path / "wins.html", shop, "--where", "return > 0")
    with tab_at(browser, out.as_uri(), offline=True) as tab:
        tab.open("table")
        assert "return > 0" in tab.text(".counts")
        assert {"1"} == set(tab.values("tbody [data-name=return]"))


RECORDED = {
    "advantage": "advantages",
    "weight": "weights",
    "old_logprob": "old_logprobs",
    "logprob": "logprobs",
    "importance_weight": "importance_weights",
    "entropy": "entropy",
    "loss": "losses",
}


@pytest.mark.parametrize("num_rows", [2, pytest.param(10, marks=pytest.mark.nightly)])
def test_a_report_has_every_bit_of_20_random_tokens_of_a_row(
    num_rows, browser, tokenizer, smollm2_dir, tmp_path
):
    """What the page unpacks is what the dataset and the run store."""
    run = large_run(tmp_path, tokenizer, num=24, num_groups=(1, 2))
    out = export(tmp_path / "report.html", run, "--tokenizer", smollm2_dir)
    rows = {row["trajectory_id"]: row for row in scan(tmp_path / "dataset").collect().to_dicts()}
    records = scan_token_records(run, 2).collect()
    rng, checked = np.random.default_rng(3), 0
    with tab_at(browser, out.as_uri(), offline=True) as tab:
        for record in records.sample(num_rows, seed=1).to_dicts():
            name = record["trajectory_id"]
            row, place = rows[name], f"tokens?trajectory={name}&task={record['instance_id']}"
            tab.open(f"{place}&step=0&update=2")
            for at in rng.integers(0, 1600, 20).tolist():
                tab.go(f"{place}&step=0&update=2&at={NUM_PROMPT + at}")
                tab.page.wait_for_selector(f"aside[data-token='{NUM_PROMPT + at}']")
                shown = tab.page.eval_on_selector_all(
                    "aside .facts [data-name]",
                    "all => Object.fromEntries(all.map(one => [one.dataset.name, one.dataset.value]))",
                )
                assert int(shown["id"]) == row["response_ids"][at]
                spelled = tokenizer.decode([row["response_ids"][at]]).encode()
                if b"\xef\xbf\xbd" not in spelled:
                    assert bytes.fromhex(shown["bytes"]) == spelled
                assert float(shown["rollout_logprob"]) == row["rollout_logprobs"][at]
                for column, stored in RECORDED.items():
                    assert float(shown[column]) == record[stored][at], column
                checked += 1
    assert checked == 20 * num_rows
