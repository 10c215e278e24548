"""Datasets of real engines and harnesses, and a million trajectories: all views, and as a report."""

import random
from urllib.parse import quote

import polars as pl
import pytest

from benchmarks.view import written
from rollout_io import convert, scan
from rollout_io.conversion.plan import Keywords
from tests.browser.conftest import export, made_once, number, tab_at, viewer
from tests.conftest import EXAMPLES, ROOT
from tests.helpers.view_helpers import facts_of

LOGS = {
    "forks": "vllm_calls/forks.calls.jsonl",
    "long": "vllm_calls/long.calls.jsonl",
    "claude_code": EXAMPLES / "claude_code",
    "harbor": EXAMPLES / "harbor",
    "inspect": ROOT / "tests" / "data" / "inspect_zstd.eval",
    "public_claude_code": "harness_logs/claude_code/simonw.sample_session.jsonl",
    "public_harbor": "harness_logs/harbor/golden/terminus_2",
    "public_inspect": "harness_logs/inspect_ai/2025-05-12T20-28-26-04-00_security-guide.json",
}
OPENED = [
    pytest.param(("forks", "long"), marks=pytest.mark.nightly),
    pytest.param(("claude_code", "harbor"), marks=pytest.mark.nightly),
    pytest.param(("inspect", "public_inspect"), marks=pytest.mark.nightly),
    ("public_claude_code", "public_harbor"),
    pytest.param(("thousands", "thousand"), marks=pytest.mark.nightly),
    pytest.param(("million", "thousand"), marks=pytest.mark.nightly),
]
SIZES = {"million": 1_000_000, "thousands": 50_000, "thousand": 1_000}
NUM_IN_A_REPORT = 200


@pytest.fixture(scope="module", params=OPENED, ids="-".join)
def paths(request, smollm2_dir, tmp_path_factory):
    """Two datasets: {name: path}."""
    found = {}
    for name in request.param:
        if name in SIZES:
            found[name] = made_once(
                tmp_path_factory, name, lambda out, name=name: written(out, SIZES[name])
            )
            continue
        log = LOGS[name]
        if isinstance(log, str):
            log = request.getfixturevalue("harness_logs").parent / log
        if not log.exists():
            pytest.skip(f"no {log}")
        found[name] = made_once(
            tmp_path_factory, name, lambda out, log=log: converted(log, out, smollm2_dir)
        )
    return found


def converted(log, out, tokenizer):
    """Convert calls with their rewards, or messages with a tokenizer."""
    if log.name.endswith(".calls.jsonl"):
        choices = Keywords(rewards=str(log).replace(".calls.", ".rewards."))
    else:
        choices = Keywords(
            tokenizer=str(tokenizer), chat_template="chatml_tools_thinking", on_error="skip"
        )
    convert(log, out, **choices)


def chosen_in(path):
    """Return a task with the most attempts, and its longest attempt: (task, trajectory, rows)."""
    rows = scan(path).select("instance_id", "trajectory_id", "step_index")
    attempts = rows.group_by("instance_id", "trajectory_id", maintain_order=True).agg(pl.len())
    tasks = pl.len().over("instance_id")
    best = (
        attempts.head(NUM_IN_A_REPORT)
        .with_columns(tasks=tasks)
        .sort("tasks", "len", maintain_order=True)
    )
    task, trajectory = best.select("instance_id", "trajectory_id").collect().row(-1)
    return task, trajectory, scan(path).filter(instance_id=task).collect()


def num_prefixes(rows):
    """Count the distinct prefixes of rows' tokens."""
    seen = set()
    for row in rows.iter_rows(named=True):
        state = 0
        for token in row["prompt_token_ids"] + row["response_ids"]:
            state = hash((state, token))
            seen.add(state)
    return len(seen)


def walk(tab, data, path, other_path, *, num_shown):
    """Go through the eight views of a dataset; returns what they show, and checks it."""
    told = {}
    task, trajectory, rows = chosen_in(path)
    own = rows.filter(trajectory_id=trajectory)
    of = f"data={data}&task={quote(task)}&trajectory={quote(trajectory)}"

    tab.open(f"run?{of}")
    told["run"] = tab.text()
    assert "No run is open" in told["run"]

    tab.open(f"table?data={data}")
    tab.page.wait_for_selector(".counts data")
    assert [number(one) for one in tab.values(".counts data")] == num_shown
    shown = told["table"] = tab.table("Trajectories")
    known = facts_of(path, pl.col("trajectory_id").is_in(list(shown)))
    assert list(shown) == list(known)
    for name, cells in shown.items():
        assert {key: number(cells.get(key, "null")) for key in known[name]} == known[name]

    tab.open(f"group?{of}")
    shown = told["group"] = tab.table("Attempts")
    known = facts_of(path, pl.col("instance_id") == task)
    assert list(shown) == list(known)
    for name, cells in shown.items():
        for key in ("return", "num_rows", "response_tokens", "trained_tokens"):
            assert number(cells[key]) == known[name][key]
    assert tab.page.locator("canvas, .failure").count() == 0

    tab.open(f"tree?{of}")
    told["tree"] = tab.text(".lead")
    assert number(tab.values(".lead [data-name=num_tokens]")[0]) == num_prefixes(rows)

    tab.open(f"conversation?{of}")
    if tab.page.locator("button:has-text('Unfold all')").count():  # absent where nothing folds
        tab.press("e")
        tab.page.wait_for_selector("button:has-text('Fold all')")
    told["conversation"] = tab.text()
    assert tab.page.locator("article.turn").count() > 0
    if "response_text" in own.columns:
        said = (own["response_text"][-1] or "").split('[{"')[0].strip().splitlines()[-1:]
        assert "".join(said) in tab.page.text_content("main")

    told["tokens"] = {}
    place = f"tokens?{of}&step={own['step_index'][-1]}"
    tab.open(place)
    row = own.row(-1, named=True)
    prompt = row["prompt_token_ids"]
    ids = prompt + row["response_ids"]
    tab.page.wait_for_selector(f'canvas.tokens[data-tokens="{len(ids)}"]')
    draw = random.Random(data)
    for at in draw.sample(range(len(ids)), min(20, len(ids))):
        cells = told["tokens"][at] = tab.token(f"{place}&at={at}", at)
        assert number(cells["id"]) == ids[at]
        assert number(cells["trained"]) == (
            at >= len(prompt) and row["loss_mask"][at - len(prompt)]
        )
        if at >= len(prompt) and row.get("rollout_logprobs") is not None:
            stored = row["rollout_logprobs"][at - len(prompt)]
            assert number(cells["rollout_logprob"]) == stored

    tab.open(f"update?{of}")
    told["update"] = tab.text()
    assert "No run is open" in told["update"]

    if data == "d1":  # a report compares in one direction
        return told
    tab.open(f"diff?{of}")
    told["diff"] = tab.text(".tiles")
    tasks = [
        set(scan(one).select("instance_id").unique().collect()["instance_id"])
        for one in (path, other_path)
    ]
    facts = {"tasks": tasks[0] & tasks[1], "only in A": tasks[0] - tasks[1]}
    facts["only in B"] = tasks[1] - tasks[0]
    for name, wanted in facts.items():
        assert number(tab.values(f'.tiles [data-name="{name}"]')[0]) == len(wanted)
    return told


def filter_sort_and_scroll(tab, path):
    """What a table of generated trajectories counts and orders, Polars counts and orders."""
    rows = scan(path).select("trajectory_id", "reward", "difficulty", "topic").collect()
    kept = rows.filter(pl.col("reward") < 0.1, pl.col("topic") == "math")
    condition = quote("return < 0.1 AND topic = 'math'")
    tab.open(f"table?where={condition}&sort=difficulty&descending=1")
    assert [number(one) for one in tab.values(".counts data")] == [len(kept), len(rows)]
    ordered = kept.sort("difficulty", descending=True, maintain_order=True)["trajectory_id"]
    shown = list(tab.table("Trajectories"))
    assert shown == ordered[: len(shown)].to_list()
    tab.open("table")
    tab.press("End")
    tab.page.wait_for_selector(f'tr[data-row="{rows["trajectory_id"][-1]}"].chosen')
    tab.settle()
    shown = list(tab.table("Trajectories"))
    assert shown == rows["trajectory_id"][-len(shown) :].to_list()


def test_all_views_and_a_report_hold_the_numbers_of_the_dataset(
    browser, paths, smollm2_dir, tmp_path
):
    """The report is read from disk, without a network, and says what the server said."""
    (first, second), settings = paths.values(), ["--tokenizer", smollm2_dir]
    pairs = {"d0": (first, second), "d1": (second, first)}
    num = pl.col("trajectory_id").n_unique()
    sizes = {path: scan(path).select(num).collect().item() for path in paths.values()}
    served, read = {}, {}
    with viewer(first, second, *settings) as address, tab_at(browser, address) as tab:
        for data, (path, other) in pairs.items():
            num_shown = [sizes[path]] * 2
            served[data] = walk(tab, data, path, other, num_shown=num_shown)
        if "thousand" in paths:
            filter_sort_and_scroll(tab, first)
    report = export(tmp_path / "report.html", first, second, *settings)
    with tab_at(browser, report.as_uri(), offline=True) as tab:
        for data, (path, other) in pairs.items():
            num_shown = [min(sizes[path], NUM_IN_A_REPORT), sizes[path]]
            read[data] = walk(tab, data, path, other, num_shown=num_shown)
    for data in pairs:
        tables = served[data].pop("table"), read[data].pop("table")
        both = tables[0].keys() & tables[1].keys()
        assert len(both) >= min(len(tables[0]), 5)  # histograms take some rows' place
        assert all(tables[0][name] == tables[1][name] for name in both)
        assert read[data] == served[data]
