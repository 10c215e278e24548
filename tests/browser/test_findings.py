"""Verdicts of an audit and shares of an update are seen, found and reached by keyboard."""

import json
import shutil

import pytest

from rollout_io import scan
from rollout_io.dataset.trajectory_facts import with_stored_digest
from tests.browser.conftest import export, number, tab_at, viewer
from tests.browser.test_hostile import HOSTILE, NAME, check
from tests.helpers.findings_helpers import (
    share,
    verdict,
    write_dataset,
    write_shares,
    write_verdicts,
)

REASON = "version 5, from token 9 version 6, labelled 5"
ROW = "trajectory=shop-7_1&task=shop-7&step=0"
COLOURS = """() => {
    const canvas = document.querySelector("canvas.tokens");
    const bad = getComputedStyle(document.documentElement).getPropertyValue("--bad").trim();
    const wanted = [1, 3, 5].map(at => parseInt(bad.slice(at, at + 2), 16));
    const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    let found = 0;
    for (let at = 0; at < data.length; at += 4)
        found += Number(wanted.every((part, place) => data[at + place] === part));
    return found;
}"""


def stored_verdict(dataset, name, step, ids, **values):
    return verdict(dataset, name, step, ids, row_digest=stored(dataset, name, step), **values)


def stored_share(dataset, name, step, ids, value):
    return share(dataset, name, step, ids, value, row_digest=stored(dataset, name, step))


def stored(dataset, name, step):
    """The digest of a row of a dataset."""
    rows = with_stored_digest(scan(dataset)).filter(trajectory_id=name, step_index=step)
    return rows.select("row_digest").collect().item()


@pytest.fixture(scope="module")
def tables(shop, tmp_path_factory):
    """A swap in shop-7_1, other weights in shop-7_2; the shares of all rows, largest in shop-7_1."""
    folder = tmp_path_factory.mktemp("tables")
    rows = scan(shop).select("trajectory_id", "step_index", "response_ids").collect().rows()
    known = {row[:2]: row for row in rows}
    found = [stored_verdict(shop, *row) for row in rows if row[0] not in ("shop-7_1", "shop-7_2")]
    swap = {"kind": "swap", "swap_position": 9, "reason": REASON, "log_likelihood_ratio": 31.25}
    found.append(stored_verdict(shop, *known["shop-7_1", 0], **swap))
    version = {"kind": "version", "start": 2, "end": 4, "reason": "sampled by version 3"}
    found.append(stored_verdict(shop, *known["shop-7_2", 0], **version))
    values = [
        0.5 if row[:2] == ("shop-7_1", 0) else -(at + 1) / 1024 for at, row in enumerate(rows)
    ]
    shares = [stored_share(shop, *row, value) for row, value in zip(rows, values, strict=True)]
    return (
        write_verdicts(folder / "verdicts.parquet", found),
        write_shares(folder / "blame.parquet", shares, gradient_norm=[1.5] * len(rows)),
    )


@pytest.fixture(
    scope="module", params=["server", pytest.param("report", marks=pytest.mark.nightly)]
)
def tab(browser, shop, tables, smollm2_dir, tmp_path_factory, request):
    arguments = (shop, *tables, "--tokenizer", smollm2_dir)
    if request.param == "server":
        with viewer(*arguments) as address, tab_at(browser, address) as tab:
            yield tab
        return
    out = export(tmp_path_factory.mktemp("report") / "report.html", *arguments)
    with tab_at(browser, out.as_uri(), offline=True) as tab:
        yield tab


def test_the_table_shows_and_sorts_by_faults_and_shares(tab):
    tab.open("table?sort=share_of_update_3&descending=1")
    rows = tab.table("Trajectories")
    assert next(iter(rows)) == "shop-7_1"
    assert rows["shop-7_1"]["faults"] == "swap"
    assert tab.page.locator("tbody .badge.bad").count() >= 1
    assert tab.page.locator("tbody .badge.quiet").count() >= 1
    assert tab.page.get_by_role("columnheader", name="share of update 3").count() == 1
    tab.page.click("th >> text=certainty of faults")
    tab.settle()
    tab.page.wait_for_selector("tbody [data-name=fault_nats]")
    assert number(tab.values("tbody [data-name=fault_nats]")[0]) == 31.25


def test_faults_of_a_row_are_outlined_listed_and_reached_by_key(tab):
    tab.open("tokens?trajectory=shop-4_1&task=shop-4&step=0")
    tab.page.get_by_text("sampled as labelled").wait_for()
    assert tab.page.evaluate(COLOURS) == 0
    tab.open(f"tokens?{ROW}")
    listed = tab.page.get_by_role("region", name="Verdicts of the audit")
    listed.get_by_text(REASON).wait_for()
    assert "31.25 nats" in listed.inner_text()
    assert tab.page.evaluate(COLOURS) > 100
    prompt = int(tab.values("header [data-name=prompt_tokens]")[0])
    for key, position in (("v", 0), ("v", 9), ("v", 0), ("V", 9)):
        tab.press(key)
        tab.page.wait_for_selector(f'aside[data-token="{prompt + position}"]')
        said = tab.text("aside [data-name=fault]")
        assert said.startswith(f"swap: {REASON}")
        assert said.endswith("(first token after the swap)") == (position == 9)
    listed.get_by_role("button").click()
    assert f"at={prompt + 9}" in tab.page.url
    box = tab.page.locator("canvas.tokens").bounding_box()
    for line in range(20):  # until one of the response is under the mouse
        tab.page.mouse.move(box["x"] + 60, box["y"] + 23 + 22 * line)
        if tab.page.locator(".scroller[title^='swap: ']").count():
            break
    assert REASON in tab.page.get_attribute(".scroller", "title")


def test_tokens_are_coloured_by_their_share(tab):
    tab.open(f"tokens?{ROW}&color=share_of_update_3")
    assert tab.page.input_value("#color") == "share_of_update_3"
    legend = tab.text(".legend")
    assert legend.startswith("share of update 3")
    assert "\u2212" in legend  # a diverging scale around 0


def test_the_rows_of_an_update_lead_to_their_tokens(tab):
    tab.open("update")
    label = "Rows by their share of update 3"
    rows = tab.table(label)
    assert len(rows) == 10
    assert next(iter(rows)) == "shop-7_1 0"
    assert number(rows["shop-7_1 0"]["share"]) == 0.5
    sizes = [abs(number(row["share"])) for row in rows.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert {row["gradient_norm"] for row in rows.values()} == {"1.5"}
    tab.page.get_by_role("table", name=label).get_by_role("link", name="shop-7_1").focus()
    tab.press("Enter")
    tab.page.wait_for_selector("canvas.tokens[data-row='shop-7_1 0']")
    assert tab.page.input_value("#color") == "share_of_update_3"


def test_the_tables_of_a_run_are_found_from_any_update(browser, shop, tables, tmp_path):
    run = tmp_path / "run"
    (run / "blame").mkdir(parents=True)
    shutil.copy(tables[1], run / "blame")
    (run / "config.json").write_text(json.dumps({"data": {"dataset": str(shop)}}))
    lines = [{"global_step": step, "loss": 1.0} for step in (2, 3)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with viewer(run) as address, tab_at(browser, address) as tab:
        tab.open("update?update=2")
        assert tab.page.get_by_role("table", name="Rows by their share").count() == 0
        tab.page.get_by_text("computed the shares of update 3").get_by_role("link").click()
        tab.page.get_by_role("table", name="Rows by their share of update 3").wait_for()
        assert "blame.parquet" in tab.text("h2 >> nth=0")
        # The server answers 400 for the tokens of these updates, because none were recorded.
        assert all("400" in text for text in tab.problems)
        tab.problems.clear()


def test_hostile_tables_run_nothing(browser, tmp_path):
    dataset = write_dataset(tmp_path / "ds")
    row = ("t_0", 0, [5, 6, 7, 8])
    texts = {"kind": HOSTILE, "reason": HOSTILE, "best_weights": HOSTILE, "swap_position": 2}
    verdicts = write_verdicts(tmp_path / "v.parquet", [stored_verdict(dataset, *row, **texts)])
    shares = write_shares(
        tmp_path / "b.parquet",
        [stored_share(dataset, *row, float("nan"))],
        **{name: [1] for name in (NAME, NAME.replace("\0", ""))},
    )
    out = export(tmp_path / "report.html", dataset, verdicts, shares)
    with viewer(dataset, verdicts, shares) as address, tab_at(browser, address) as tab:
        for place in ("table", "tokens?trajectory=t_0&task=t&at=r2", "update"):
            assert "<scrip" in check(tab, place)
    with tab_at(browser, out.as_uri(), offline=True) as tab:
        for place in ("table", "tokens?trajectory=t_0&task=t&at=r2", "update"):
            check(tab, place)
