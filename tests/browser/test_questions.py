"""The page answers why a task did not improve: which updates recorded it, and what was sampled."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.rewards import trajectory_returns
from rollout_io import scan
from rollout_io.dataset.trajectory_facts import with_stored_digest
from schemas.records import token_record_path, token_record_schema
from tests.browser.conftest import tab_at, viewer

UPDATES = {2: ["shop-7", "shop-4"], 5: ["shop-7"], 6: ["shop-4"]}
# The labels of a small metric's y axis as they are drawn anew, and how many begin outside the canvas.
LABELS = """() => {
    const write = CanvasRenderingContext2D.prototype.fillText;
    const found = {drawn: 0, outside: 0};
    const canvas = document.querySelector('[data-metric="learning_rate"] canvas');
    CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
        if (this.canvas === canvas && this.textAlign === "right") {
            found.drawn += 1;
            found.outside += Number(x - this.measureText(text).width < 0);
        }
        return write.call(this, text, x, y);
    };
    canvas.closest("figure").lastElementChild.style.width = "300px";
    return new Promise(done => setTimeout(() => {
        CanvasRenderingContext2D.prototype.fillText = write;
        done(found);
    }, 500));
}"""
LEFT_OUT = ("shop-7_2", 5)  # a trajectory of which an update recorded nothing


def write_records(run, update, dataset, tasks):
    """Records of the tasks' rows, with an advantage of half the update's number."""
    rows = with_stored_digest(scan(dataset)).collect().rows(named=True)
    rows = [row for row in rows if row["instance_id"] in tasks]
    rows = [row for row in rows if (row["trajectory_id"], update) != LEFT_OUT]
    sizes = [len(row["response_ids"]) for row in rows]
    known = {
        "dataset": [str(dataset)] * len(rows),
        **{k: [row[k] for row in rows] for k in ("instance_id", "trajectory_id", "step_index")},
        "row_digest": [row["row_digest"] for row in rows],
        "loss_mask": [[True] * size for size in sizes],
        "advantages": [[update / 2] * size for size in sizes],
        "logprobs": [[-0.5] * size for size in sizes],
        "importance_weights": [[1.0] * size for size in sizes],
        "weights": [[1.0] * size for size in sizes],
        "losses": [[0.25] * size for size in sizes],
    }
    schema = token_record_schema()
    arrays = [pa.array(known.get(field.name, [None] * len(rows)), field.type) for field in schema]
    path = token_record_path(run, update)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema), path)


@pytest.fixture(scope="module")
def tab(browser, shop, tmp_path_factory):
    """A run of `train` that recorded different tasks in each update."""
    run = tmp_path_factory.mktemp("questions") / "run"
    for update, tasks in UPDATES.items():
        write_records(run, update, shop, tasks)
    (run / "config.json").write_text(json.dumps({"data": {"dataset": str(shop)}}))
    lines = [
        {"global_step": step, "return_mean": step / 10, "num_groups": 4, "num_trained_groups": 3}
        | {"learning_rate": 1e-6 * (1 + step / 10)}
        for step in range(1, 7)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with viewer(run) as address, tab_at(browser, address) as tab:
        yield tab


def test_a_group_opens_the_newest_update_that_recorded_it_and_names_the_others(tab):
    tab.open("group?task=shop-7")
    tab.page.get_by_text("Advantages are from update 5").wait_for()
    assert tab.text(".recorded-in") == "Recorded in updates 2 and 5."
    tab.page.click(".recorded-in a")
    tab.page.get_by_text("Advantages are from update 2").wait_for()
    tab.open("group?task=shop-7&update=6")
    said = "Update 6 did not record this task. Recorded in updates 2 and 5."
    tab.page.get_by_text(said).wait_for()
    assert "update=6" in tab.page.url  # an update that somebody chose stays
    tab.open("group?task=shop-1")
    tab.page.get_by_text("No update of this run recorded this task").wait_for()


def test_tokens_name_the_updates_that_recorded_the_row(tab):
    tab.open("tokens?trajectory=shop-7_2&step=0&update=5")
    tab.page.get_by_text("Update 5 did not record this row. Recorded in update 2.").wait_for()
    tab.open("tokens?trajectory=shop-7_1&step=0")
    tab.page.get_by_text("Recorded in updates 2 and 5.").wait_for()
    assert "update=5" in tab.page.url


def test_a_run_of_one_dataset_says_what_its_rewards_are(tab):
    tab.open("run")
    tab.page.get_by_text(
        "Rewards come from the dataset, because this run did not sample."
    ).wait_for()
    assert "Groups with a gradient: 3 of 4 in the last update, 18 of 24 in total." in tab.text()
    labels = tab.page.evaluate(LABELS)
    assert labels["drawn"] > 0
    assert labels["outside"] == 0


def test_weights_that_are_all_1_are_a_sentence(tab):
    tab.open("update?update=5")
    tab.page.get_by_text("All importance weights are 1: the policy was the same").wait_for()
    assert tab.page.locator(".scatter canvas").count() == 0
    tab.page.get_by_text("largest absolute contribution to the loss first").wait_for()


def test_a_task_is_found_by_its_id_and_a_filter_says_what_it_hides(tab):
    tab.open("table?where=instance_id%20%3D%20'shop-2'")
    tab.page.fill(".find input", "shop-7")
    tab.press("Enter")
    tab.page.get_by_text("No matches in the 4 filtered trajectories").wait_for()
    tab.page.click('.hits button:has-text("Search all 48")')
    tab.page.get_by_text("filtered trajectories").wait_for(state="detached")
    tab.page.click('.hits button:has-text("task shop-7: 4 attempts")')
    tab.page.wait_for_selector('h1:has-text("Attempts at shop-7")')
    tab.press("Escape")


def test_a_group_without_a_task_lists_all_by_spread(tab, shop):
    tab.open("group")
    returns = trajectory_returns(scan(shop)).group_by("instance_id").agg("return").collect()
    known = {name: max(values) - min(values) for name, values in returns.rows()}
    shown = {name: float(cells["spread"]) for name, cells in tab.table("Tasks").items()}
    assert shown == known
    assert list(shown.values()) == sorted(known.values())
    notes = tab.page.locator('[data-row] >> text="no advantage: all returns are equal"').count()
    assert notes == list(known.values()).count(0) > 0
    tab.page.click('[data-row="shop-7"] a')
    tab.page.wait_for_selector('h1:has-text("Attempts at shop-7")')
