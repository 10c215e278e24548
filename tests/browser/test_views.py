"""All eight views of a real run in a real Chromium: what they show is what the files hold."""

import json
import random
import re
import shlex

import polars as pl
import pytest

import rollout_io
from rollout_io.cli.main import run as main
from tests.browser.conftest import number, tab_at, viewer
from tests.helpers.view_helpers import facts_of

ARRAYS = {
    "advantage": "advantages",
    "weight": "weights",
    "old_logprob": "old_logprobs",
    "logprob": "logprobs",
    "ref_logprob": "ref_logprobs",
    "importance_weight": "importance_weights",
    "correction_weight": "correction_weights",
    "entropy": "entropy",
    "loss": "losses",
    "clipped": "clipped",
    "rejected": "rejected",
}
ROW = ["trajectory_id", "step_index"]
# Texts whose contrast with what is behind them is below 4.5 (WCAG 2, AA), except on disabled controls.
TOO_FAINT = """() => {
    const context = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const read = (colour) => {
        context.clearRect(0, 0, 1, 1);
        context.fillStyle = colour;
        context.fillRect(0, 0, 1, 1);
        return [...context.getImageData(0, 0, 1, 1).data].map(part => part / 255);
    };
    const over = ([r, g, b, a], [x, y, z]) =>
        [r * a + x * (1 - a), g * a + y * (1 - a), b * a + z * (1 - a), 1];
    const behind = (element) => {
        if (element === null) return [1, 1, 1, 1];
        const own = read(getComputedStyle(element).backgroundColor);
        return own[3] === 1 ? own : over(own, behind(element.parentElement));
    };
    const light = (colour) => {
        const [r, g, b] = colour.slice(0, 3).map(
            part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const opacity = (element) => element === null ? 1 :
        Number(getComputedStyle(element).opacity) * opacity(element.parentElement);
    const found = new Set();
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const element = texts.currentNode.parentElement;
        if (texts.currentNode.textContent.trim() === "" || !element.checkVisibility()) continue;
        if (element.closest(":disabled, option, script, style, .hidden, .skip") !== null) continue;
        const ground = behind(element);
        const ink = read(getComputedStyle(element).color);
        ink[3] *= opacity(element);
        const [a, b] = [light(over(ink, ground)), light(ground)];
        const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (contrast < 4.5) found.add(`${element.className}: ${texts.currentNode.textContent.trim()} ${contrast}`);
    }
    return [...found];
}"""


@pytest.fixture(scope="module")
def address(run, merged, smollm2_dir):
    with viewer(run, merged, "--tokenizer", smollm2_dir) as found:
        yield found


@pytest.fixture(scope="module")
def tab(browser, address):
    with tab_at(browser, address) as found:
        yield found


@pytest.fixture(scope="module")
def steps(shop):
    return rollout_io.scan(shop).collect()


@pytest.fixture(scope="module")
def records(run):
    files = {int(path.stem.split("_")[-1]): path for path in (run / "tokens").glob("*.parquet")}
    return {step: pl.read_parquet(path) for step, path in sorted(files.items())}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_view_is_shown_without_a_problem(browser, address, theme):
    views = {
        "run": "updates. Click a point",
        "table": "48 of 48 trajectories",
        "group?task=shop-7": "4 attempts",
        "tree?task=shop-7": "distinct tokens",
        "conversation?task=shop-4&trajectory=shop-4_1": "checker",
        "tokens?task=shop-7&trajectory=shop-7_2": "response tokens",
        "update?update=2": "Targets by rule",
        "diff?task=shop-7": "tasks in both",
    }
    with tab_at(browser, address, color_scheme=theme) as tab:
        for view, wanted in views.items():
            tab.open(view)
            tab.page.get_by_text(wanted).first.wait_for()
            assert tab.page.locator("h1").count() == 1
            links = tab.page.locator("nav a[aria-current=page]").all_inner_texts()
            assert [link.lstrip("12345678\n").lower() for link in links] == [view.split("?")[0]]
            ground = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (ground == "rgb(255, 255, 255)") == (theme == "light")
            assert tab.page.evaluate(TOO_FAINT) == []


def test_the_table_holds_the_numbers_of_the_dataset(tab, shop):
    tab.open("table?sort=return&descending=1")
    shown = tab.table("Trajectories")
    assert len(shown) >= 10
    known = facts_of(shop)
    for name, cells in shown.items():
        assert {key: number(cells[key]) for key in known[name]} == known[name]
    returns = [number(cells["return"]) for cells in shown.values()]
    assert returns == sorted(returns, reverse=True)


def test_filters_sorts_and_brushes_count_what_polars_counts(tab, steps):
    last = steps.group_by("trajectory_id", maintain_order=True).last()

    def counted():
        tab.settle()
        return [number(value) for value in tab.values(".counts data")]

    tab.open("table")
    assert counted() == [48, 48]
    tab.press("f")
    tab.page.keyboard.type("style = 'strip' AND return > 0")
    tab.press("Enter")
    wanted = steps.filter((pl.col("style") == "strip") & (pl.col("reward") > 0))
    tab.page.wait_for_function("location.hash.includes('where')")
    tab.page.wait_for_selector('.counts data:first-of-type:not([value="48"])')
    assert counted() == [wanted["trajectory_id"].n_unique(), 48]
    tab.page.go_back()
    tab.page.wait_for_selector('.counts data[value="48"] >> nth=1')
    assert counted() == [48, 48]
    bars = tab.page.locator('[data-histogram="return"] svg')
    box = bars.bounding_box()
    tab.page.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 20)
    tab.page.mouse.down()
    tab.page.mouse.move(box["x"] + box["width"] - 1, box["y"] + 20)
    tab.page.mouse.up()
    tab.page.wait_for_selector('.counts data:first-of-type:not([value="48"])')
    assert '"return" >= ' in tab.page.input_value("#where")
    assert counted() == [len(last.filter(pl.col("reward") > 0.75)), 48]
    tab.page.click('[data-histogram="stop_reason"] button:has-text("length")')
    both = last.filter((pl.col("reward") > 0.75) & (pl.col("stop_reason") == "length"))
    tab.page.wait_for_selector(f'.counts data:first-of-type[value="{len(both)}"]')
    assert counted() == [len(both), 48]


def test_a_group_shows_its_returns_advantages_and_lengths(tab, steps, records):
    step, recorded = next(iter(records.items()))
    task = recorded["instance_id"][0]
    tab.open(f"group?task={task}&update={step}")
    shown = tab.table("Attempts")
    rows = steps.filter(pl.col("instance_id") == task)
    assert list(shown) == rows["trajectory_id"].unique(maintain_order=True).to_list()
    for name, cells in shown.items():
        own = rows.filter(pl.col("trajectory_id") == name)
        assert number(cells["return"]) == own["reward"][-1]
        assert number(cells["response_tokens"]) == own["response_ids"].list.len().sum()
        assert number(cells["num_rows"]) == len(own)
        assert number(cells["trained_tokens"]) == own["loss_mask"].list.sum().sum()
        trained = recorded.filter(pl.col("trajectory_id") == name)["advantages"].explode()
        assert number(cells["advantage"]) == trained.cast(float).mean()


def test_200_random_tokens_hold_what_trained(tab, steps, records):
    draw = random.Random(0)
    seen = set()
    for _ in range(10):
        step = draw.choice(list(records))
        row = records[step].row(draw.randrange(len(records[step])), named=True)
        trajectory, index = row["trajectory_id"], row["step_index"]
        stored = steps.row(
            by_predicate=(pl.col("trajectory_id") == trajectory) & (pl.col("step_index") == index),
            named=True,
        )
        place = f"tokens?trajectory={trajectory}&step={index}&update={step}"
        prompt = stored["prompt_token_ids"]
        ids = prompt + stored["response_ids"]
        tab.open(place)
        tab.page.wait_for_selector(f'canvas.tokens[data-tokens="{len(ids)}"]')
        for at in draw.sample(range(len(ids)), 20):
            cells = tab.token(f"{place}&at={at}", at)
            assert number(cells["id"]) == ids[at]
            own = at - len(prompt)
            if own < 0:
                assert number(cells["trained"]) is False
                continue
            seen.add((step, trajectory, index, own))
            assert number(cells["trained"]) == stored["loss_mask"][own]
            assert number(cells["rollout_logprob"]) == stored["rollout_logprobs"][own]
            for name, column in ARRAYS.items():
                assert number(cells[name]) == row[column][own], name
            if (logprob := row["logprobs"][own]) is not None:
                assert number(cells["difference"]) == logprob - stored["rollout_logprobs"][own]
                assert number(cells["ref_difference"]) == logprob - row["ref_logprobs"][own]
    assert len(seen) > 50


def test_an_update_ranks_the_rows_that_it_trained(tab, steps, records):
    recorded = records[2].join(
        steps.select(*ROW, "rollout_logprobs"), on=ROW, maintain_order="left"
    )
    tab.open("update?update=2")
    shown = tab.table("Rows of the update")
    tab.page.eval_on_selector(".virtual", "table => { table.scrollTop = 1e6 }")
    tab.page.wait_for_selector(f'tr[data-index="{len(recorded) - 1}"]')
    shown |= tab.table("Rows of the update")
    assert len(shown) == len(recorded)
    lists = [*ARRAYS.values(), "rollout_logprobs", "loss_mask"]
    totals = dict.fromkeys(("num_targets", "num_clipped", "num_rejected"), 0)
    for at, row in enumerate(recorded.iter_rows(named=True)):
        cells = shown[f"{row['trajectory_id']} {row['step_index']}"]
        targets = recorded[at].select(lists).explode(lists).filter("loss_mask")
        numbers = targets.cast({pl.Float32: pl.Float64})
        distance = (numbers["logprobs"] - numbers["rollout_logprobs"]).abs()
        wanted = {
            "loss_share": (numbers["weights"] * numbers["losses"]).sum(),
            "advantage": numbers["advantages"].mean(),
            "num_targets": len(targets),
            "max_importance_weight": numbers["importance_weights"].max(),
            "max_abs_difference": distance.max(),
            "mean_abs_difference": distance.mean(),
            "num_clipped": targets["clipped"].sum(),
            "num_rejected": targets["rejected"].sum(),
        }
        assert {name: number(cells[name]) for name in wanted} == wanted
        totals = {name: total + wanted[name] for name, total in totals.items()}
    assert totals["num_rejected"] > 0
    shares = [abs(number(cells["loss_share"])) for cells in shown.values()]
    assert shares == sorted(shares, reverse=True)
    assert number(tab.values(".masks .lead [data-name=num_targets]")[0]) == totals["num_targets"]
    rules = tab.table("Targets by rule")
    assert {name: number(cells[name]) for name, cells in rules.items()} == {
        "in the loss": totals["num_targets"] - totals["num_rejected"],
        "clipped": totals["num_clipped"],
        "rejected": totals["num_rejected"],
    }


def test_a_click_in_a_chart_opens_the_update(tab):
    tab.open("run")
    plot = tab.page.locator(".plot .u-over").first
    plot.hover(position={"x": 2, "y": 40})
    plot.click(position={"x": 2, "y": 40})
    tab.page.wait_for_selector("h1:has-text('Update 1')")
    tab.page.go_back()
    tab.page.wait_for_selector(".plot")


def test_the_keyboard_reaches_everything(tab, steps):
    tab.open("table")
    tab.press("j", "j", "p")
    tab.page.wait_for_selector("tr.pinned")
    tab.press("Enter")
    # The page opens the newest update that recorded the row.
    tab.page.wait_for_url(re.compile("update="))
    tab.settle()
    tab.page.wait_for_selector("canvas.tokens")
    name = tab.page.inner_text("h1 bdi")
    tab.press("r")
    prompt = len(steps.filter(pl.col("trajectory_id") == name)["prompt_token_ids"][0])
    tab.page.wait_for_selector(f'aside[data-token="{prompt}"]')
    tab.press("ArrowRight")
    tab.page.wait_for_selector(f'aside[data-token="{prompt + 1}"]')
    tab.page.select_option("#color", "rollout_logprob")
    tab.press("Escape")
    tab.page.focus(".scroller")
    tab.press("w")
    logprobs = steps.filter(pl.col("trajectory_id") == name)["rollout_logprobs"][0]
    tab.page.wait_for_selector(f'aside[data-token="{prompt + logprobs.arg_min()}"]')
    tab.press("?")
    tab.page.wait_for_selector("dialog[open] >> text=next worst token")
    tab.press("Escape")
    tab.page.wait_for_selector("dialog", state="detached")
    for key, view in enumerate(
        ("run", "table", "group", "tree", "conversation", "tokens", "update", "diff"), start=1
    ):
        tab.press(str(key))
        tab.page.wait_for_function(f"location.hash.startsWith('#/{view}')")
        tab.settle()
    tab.page.go_back()
    tab.page.wait_for_function("location.hash.startsWith('#/update')")


def test_every_view_is_operated_by_keyboard_alone(tab):
    """Without a mouse: from the address to the tokens of an update's first row, and through each view."""

    def at(view):
        tab.page.wait_for_function(f"location.hash.startsWith('#/{view}')")
        tab.settle()

    tab.open("run")
    tab.press("Tab")
    assert tab.page.evaluate("document.activeElement.textContent") == "Skip to the view"
    tab.press("Enter")
    assert tab.page.evaluate("document.activeElement.id") == "title"
    tab.press("s")
    tab.page.wait_for_function("location.hash.includes('smooth=0.1')")
    tab.press("7")
    at("update")
    tab.press("j", "Enter")
    at("tokens")
    tab.page.wait_for_selector("canvas.tokens")
    tab.press("x", "w")
    tab.page.wait_for_selector("[aria-label='Worst tokens'] >> text=1 of ")
    tab.press("5")
    at("conversation")
    tab.press("j", "j")
    assert "turn" in tab.page.evaluate("document.activeElement.className")
    tab.press("Enter")
    at("tokens")
    tab.press("3")
    at("group")
    chosen = tab.page.get_attribute("tr.chosen", "data-row")
    tab.press("j" if chosen.endswith("_0") else "k")
    tab.page.wait_for_selector(f'tr.chosen:not([data-row="{chosen}"])')
    tab.press("4")
    at("tree")
    tab.press("ArrowRight")
    tab.page.wait_for_selector("aside[data-node]")
    tab.press("Enter")
    at("tokens")
    tab.press("8")
    at("diff")
    tab.press("j")
    tab.page.wait_for_selector("tr.chosen")
    tab.press("2")
    at("table")
    tab.press("f")
    tab.page.keyboard.type("return > 0")
    tab.press("Enter")
    tab.page.wait_for_selector('.counts data[value="12"]')


TREES = {
    "run": ["heading", "slider", "img"],
    "table": ["heading", 'table "Trajectories"', "columnheader", "row "],
    "group?task=shop-7": [
        'heading "Attempts at shop-7"',
        'table "Attempts"',
        'rowheader "shop-7_0"',
    ],
    "tree?task=shop-7": ["heading", 'application "Prefix tree', "group"],
    "conversation?task=shop-4&trajectory=shop-4_1": [
        'heading "shop-4_1',
        'region "checker"',
        'article "assistant, step 0"',
    ],
    "tokens?task=shop-7&trajectory=shop-7_2&at=60": [
        'heading "shop-7_2',
        'application "',
        'complementary "Token"',
        "rowheader",
    ],
    "update?update=2": [
        'heading "Update 2',
        'table "Targets by rule"',
        'table "Rows of the update"',
    ],
    "diff?task=shop-7": ["heading", 'table "Tasks in both"', 'region "Attempts at shop-7"'],
}


@pytest.mark.parametrize("place", TREES)
def test_a_screen_reader_finds_headings_and_tables(tab, place):
    tab.open(place)
    seen = tab.page.locator("main").aria_snapshot()
    assert "[level=1]" in seen
    assert [wanted for wanted in TREES[place] if wanted not in seen] == []
    views = tab.page.get_by_role("navigation", name="Views").aria_snapshot()
    assert views.count("- link ") >= 8
    unnamed = tab.page.locator("button, input, select, [role=application]").evaluate_all(
        """all => all.filter(one => !(one.ariaLabel || one.labels?.length || one.title
            || one.textContent.trim() || one.placeholder)).map(one => one.outerHTML)"""
    )
    assert unnamed == []


def test_a_copied_command_selects_what_is_pinned(tab, shop, steps, capsys):
    pins = json.dumps(["shop-1_0", "shop-7_3"])
    tab.open(f"table?data={dataset_named(tab, 'shop')}&pins={pins}")
    tab.press("c")
    command = tab.page.input_value('textarea[aria-label="rollouts filter"]')
    polars = tab.page.input_value('textarea[aria-label="Polars filter"]')
    tab.press("Escape")
    kept = steps.filter(eval(polars, {"pl": pl}))  # noqa: S307
    assert kept["trajectory_id"].unique().sort().to_list() == ["shop-1_0", "shop-7_3"]
    words = shlex.split(command)
    assert words[:3] == ["rollouts", "filter", str(shop)]
    capsys.readouterr()
    assert main([*words[1:-2], "--dry-run", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["datasets"]
    assert found["filters"][0]["num_trajectories_dropped"] == 46


def dataset_named(tab, name):
    tab.open("table")
    return tab.page.evaluate(
        """async name => {
            const token = new URLSearchParams(location.search).get('token');
            const answer = await fetch('/api/sources', {headers: {'X-Rollouts-Token': token}});
            return (await answer.json()).datasets.find(one => one.name === name).id }""",
        name,
    )


def test_text_and_ids_are_found(tab, steps):
    tab.open("table")
    wanted = steps.filter(pl.col("trajectory_id") == "shop-7_2")["response_ids"][0][3:8].to_list()
    tab.page.select_option('[aria-label="Find what"]', "ids")
    tab.page.fill(".find input", " ".join(map(str, wanted)))
    tab.press("Enter")
    tab.page.wait_for_selector(".hits li")
    tab.press("n")
    tab.page.wait_for_selector("canvas.tokens")
    tab.page.wait_for_selector("aside[data-token]")
    assert number(tab.values("aside .facts [data-name=id]")[0]) == wanted[0]
    tab.page.select_option('[aria-label="Find what"]', "text")
    tab.page.fill(".find input", "careful calculator")
    tab.press("Enter")
    tab.page.wait_for_selector(".hits li")
    tab.page.wait_for_function("document.querySelectorAll('.hits li').length > 1")
    tab.press("Escape")


def test_a_label_becomes_a_column_of_a_copy(tab, steps, tmp_path):
    out = tmp_path / "labelled"
    tab.open(f"table?data={dataset_named(tab, 'shop')}&trajectory=shop-3_1")
    tab.press("l")
    tab.page.fill("dialog [name=column]", "verdict")
    tab.page.fill("dialog [name=value]", "off by one")
    tab.page.fill("dialog [name=out]", str(out))
    tab.page.click("dialog [type=submit]")
    tab.page.wait_for_selector("dialog >> text=Wrote")
    tab.press("Escape")
    labels = rollout_io.scan(out).select("trajectory_id", "verdict").unique().collect()
    assert len(labels) == steps["trajectory_id"].n_unique()
    assert labels.drop_nulls().rows() == [("shop-3_1", "off by one")]


def test_a_wrong_filter_is_explained(tab):
    tab.open("table?where=rewart%20%3E%200")
    tab.page.wait_for_selector("[role=alert]")
    assert re.search("rewart", tab.text("[role=alert]"))
    tab.problems.clear()  # Chromium logs the status 400
