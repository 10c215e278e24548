"""What a new user tries first: read the tasks, leave a box, press keys without a selection."""

import json

import polars as pl
import pytest

from rollout_io import RolloutWriter, scan
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


def test_escape_leaves_every_box(tab):
    tab.open("table")
    boxes = tab.page.locator("input:visible, select:visible")
    assert boxes.count() >= 4
    for at in range(boxes.count()):
        boxes.nth(at).focus()
        tab.press("Escape")
        assert tab.page.evaluate("document.activeElement === document.body"), at
    tab.page.fill("#where", "nonsense")
    tab.press("Escape")
    assert tab.page.input_value("#where") == ""
    tab.press("/")
    tab.page.keyboard.type("calculator")
    tab.press("Enter")
    tab.page.wait_for_selector(".hits li")
    tab.press("/", "Escape")
    tab.page.wait_for_selector(".hits", state="detached")
    for key in ("c", "l", "P", "?"):
        tab.press(key)
        tab.page.wait_for_selector("dialog[open]")
        tab.press("Escape")
        tab.page.wait_for_selector("dialog", state="detached")
    assert tab.page.evaluate("location.hash").startswith("#/table")


@pytest.mark.parametrize(
    "place", ["table", "group", "group?task=shop-7", "tree?task=shop-7", "diff", "conversation"]
)
def test_enter_without_a_selection_does_nothing(tab, place):
    tab.open(place)
    before = tab.page.evaluate("location.hash")
    tab.press("Enter")
    tab.settle()
    assert tab.page.evaluate("location.hash") == before


def grey(tab):
    """The reasons of grey tabs."""
    return tab.page.eval_on_selector_all(
        "nav a.grey",
        "tabs => Object.fromEntries(tabs.map(tab => [tab.textContent.slice(1), tab.title]))",
    )


def test_a_tab_without_content_is_grey_and_says_why(browser, shop, run, tmp_path, smollm2_dir):
    with viewer(run, "--tokenizer", smollm2_dir) as address, tab_at(browser, address) as tab:
        tab.open("table")
        assert grey(tab) == {"Diff": "Only one dataset is open: rollouts view DS OTHER"}
    bare = tmp_path / "bare"
    with RolloutWriter(bare) as writer:
        rows = scan(shop).filter(pl.col("step_index").eq(0), is_last_step=True).collect()
        rows = rows.unique("instance_id", maintain_order=True)
        writer.write(rows.drop("messages", "response_text", "segments", strict=False))
    with viewer(bare) as address, tab_at(browser, address) as tab:
        tab.open("table")
        reasons = grey(tab)
        assert set(reasons) == {*("Run", "Update", "Diff"), *("Tree", "Tokens", "Conversation")}
        assert "No tokenizer" in reasons["Tokens"]
        assert "one row" in reasons["Tree"]
        tab.page.click("nav a.grey >> text=Update")
        tab.page.wait_for_selector("main >> text=No run is open.")


def test_menus_and_diff_tell_datasets_with_the_same_name_apart(browser, shop, tmp_path):
    first, second, other = (tmp_path / name for name in ("a/merged", "b/merged", "c/merged"))
    for path, task in ((first, "shop-1"), (second, "shop-1"), (other, "shop-2")):
        with RolloutWriter(path) as writer:
            writer.write(scan(shop).filter(instance_id=task).collect())
    with viewer(first, second) as address, tab_at(browser, address) as tab:
        tab.open("diff")
        assert tab.text("h1") == "a/merged (A) against b/merged (B)"
        names = tab.page.eval_on_selector_all("header select option", "all => all.map(o => o.text)")
        assert {"a/merged", "b/merged"} <= set(names)
    with viewer(first, other) as address, tab_at(browser, address) as tab:
        tab.open("diff")
        assert "The datasets have no task in common." in tab.text()
        assert "share a task" in grey(tab)["Diff"]
