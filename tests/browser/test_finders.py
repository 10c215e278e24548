"""What finders found is seen in the table, at turns of the conversation and at tokens."""

import shutil

import pytest

from pipelines.rescoring.rescore import rescore
from pipelines.rescoring.scorers import Scorer
from tests.browser.conftest import tab_at, viewer

FUNCTION = """
def planted(attempt):
    if attempt.trajectory_id != "shop-7_1":
        return []
    start = attempt.num_prompt_tokens[0]
    return [{"label": "odd_one", "text": "<b>two tokens</b>", "step": 0, "start": start, "length": 2}]
"""


@pytest.fixture
def tab(browser, shop, smollm2_dir, tmp_path, monkeypatch):
    (tmp_path / "planted_here.py").write_text(FUNCTION)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    dataset = tmp_path / "ds"
    shutil.copytree(shop, dataset)
    rescore(str(dataset), "planted", Scorer(function="planted_here:planted", gives="findings"))
    with (
        viewer(dataset, "--tokenizer", smollm2_dir) as address,
        tab_at(browser, address) as tab,
    ):
        yield tab


def test_findings_are_seen_in_table_conversation_and_tokens_and_filtered(tab):
    tab.open("table?where=findings('planted')+%3E+0")
    rows = tab.table("Trajectories")
    assert list(rows) == ["shop-7_1"]
    assert rows["shop-7_1"]["findings"] == "odd_one"
    where = "trajectory=shop-7_1&task=shop-7&step=0"
    tab.open(f"conversation?{where}")
    tab.page.wait_for_selector("article.assistant [data-name=finding]")
    assert tab.page.locator("[data-name=finding]").count() == 1
    tab.open(f"tokens?{where}")
    listed = tab.page.get_by_role("region", name="Findings")
    listed.get_by_text("<b>two tokens</b>").wait_for()
    assert "response tokens 0 to 1" in listed.inner_text()
    assert tab.page.get_by_role("region", name="Verdicts of the audit").count() == 0
