"""What a new user tries first: read the tasks, leave a box, press keys without a selection."""

import json

import pytest

from rollout_io import scan
from tests.browser.conftest import tab_at, viewer


@pytest.fixture(scope="module")
def opened(shop, merged, smollm2_dir):
    with viewer(shop, merged, "--tokenizer", smollm2_dir) as address:
        yield address


@pytest.fixture
def tab(browser, opened):
    with tab_at(browser, opened) as found:
        yield found


@pytest.fixture(scope="module")
def told(shop):
    """The text of each task."""
    rows = scan(shop).filter(step_index=0).select("instance_id", "messages").collect()
    return {
        name: next(m["content"] for m in json.loads(said) if m["role"] == "user")
        for name, said in rows.unique("instance_id", keep="first").rows()
    }


def test_table_group_and_find_show_the_texts_of_tasks(tab, told):
    tab.open("table")
    cells = tab.page.eval_on_selector_all(
        "tr[data-row]",
        "rows => rows.map(row => [row.dataset.row, row.querySelector('.task-line').textContent])",
    )
    assert len(cells) > 5
    assert all(told[name.rpartition("_")[0]] == text for name, text in cells)
    tab.open("group")
    rows = tab.page.eval_on_selector_all(
        "tr[data-row]",
        "rows => rows.map(row => [row.dataset.row, row.querySelector('.task-line').textContent])",
    )
    assert dict(rows) == told
    tab.open("group?task=shop-7")
    tab.page.click("details.task summary")
    tab.page.wait_for_selector(f"details.task .said >> text={told['shop-7']}")
    tab.page.fill(".find input", "shop-7")
    tab.press("Enter")
    tab.page.wait_for_selector(".hits li")
    assert tab.text(".hits .of-task >> nth=0") == told["shop-7"]
