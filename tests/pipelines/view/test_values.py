"""Every number that the viewer shows equals what Polars reads from the dataset."""

import json
import math

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from pipelines import drift
from pipelines.filtering import judge
from pipelines.filters import where
from pipelines.rewards import place_rewards, trajectory_returns
from pipelines.view.trajectories import tasks
from pipelines.view.trajectory_index import TrajectoryIndex, by_numbers
from rollout_io import RolloutWriter, scan
from schemas.errors import RolloutError
from tests.helpers.view_helpers import response_tokens

CONDITIONS = (
    "return > 0 AND num_turns > 2",
    "any(agent = 'main' AND step_index >= 3)",
    "NOT all(stop_reason IS NULL OR stop_reason = 'length')",
    "last(stop_reason) = 'length'",
    "max(step_index) OVER (PARTITION BY trajectory_id) >= 4",
    "max(reward) OVER (PARTITION BY instance_id) < 1",
    "any(count(step_index) OVER (PARTITION BY instance_id, agent) > 8) AND instance_id <> 'shop-3'",
    "sum(reward) OVER (PARTITION BY instance_id) > avg(reward) OVER (PARTITION BY trajectory_id)",
    "NOT any(response_text LIKE '%answer%')",
    "style <> 'append'",
    "error IS NOT NULL",
)
ROOT = "/api/datasets/d0"


@pytest.fixture(params=["d0", "d1"], ids=["steps", "merged"])
def viewed(request, shop, merged_shop):
    """A dataset's id with its path."""
    return request.param, {"d0": shop, "d1": merged_shop}[request.param]


def trajectories_of(path):
    """The table of trajectories, by other means."""
    prompt, response = (pl.col(n).list.len() for n in ("prompt_token_ids", "response_ids"))
    rows = scan(path).collect()
    folded = rows.group_by("instance_id", "trajectory_id", maintain_order=True).agg(
        pl.col("repetition_id").first(),
        num_rows=pl.len(),
        prompt_tokens=prompt.sum(),
        response_tokens=response_tokens(path).sum(),
        trained_tokens=pl.col("loss_mask").list.sum().sum(),
        longest_row_tokens=(prompt + response).max(),
        stop_reason=pl.col("stop_reason").last(),
        agents=pl.col("agent").unique(maintain_order=True).str.join(", "),
        style=pl.col("style").last(),
    )
    returns = trajectory_returns(scan(path)).select("trajectory_id", "return", "error").collect()
    found = folded.join(returns, on="trajectory_id", maintain_order="left")
    return found.drop(one.name for one in found if one.null_count() == len(one))  # empty columns


def same(found, expected):
    """Whether frames are equal, whatever the widths of their integers."""
    kinds = {name: found.schema[name] for name in expected.columns}
    assert found.select(expected.columns).equals(expected.cast(kinds), null_equal=True)


def test_the_table_is_that_of_the_dataset(ask, viewed):
    number, path = viewed
    found = ask(f"/api/datasets/{number}/trajectories", limit=1000)
    same(found, trajectories_of(path))
    kinds = set(found.dtypes)
    assert pl.Int64 not in kinds
    assert pl.UInt32 not in kinds


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_filter_keeps_what_rollouts_filter_keeps(ask, viewed, condition):
    number, path = viewed
    verdicts = judge(scan(path), [where(condition)])
    kept = verdicts.filter(pl.col("reason").is_null())["trajectory_id"].to_list()
    table = ask.table(f"/api/datasets/{number}/trajectories", where=condition, limit=1000)
    assert table.column("trajectory_id").to_pylist() == kept
    chosen = trajectory_returns(scan(path)).filter(pl.col("trajectory_id").is_in(kept)).collect()
    found = {name.decode(): float(value) for name, value in table.schema.metadata.items()}
    mean = chosen["return"].mean()
    assert found.pop("mean_return") == pytest.approx(
        math.nan if mean is None else mean, nan_ok=True
    )
    assert found == {"total": len(kept), "all": 48, "failed": 0}


@pytest.mark.parametrize("column", ["instance_id", "trajectory_id"])
def test_windows_group_rows_by_numbers(column):
    """Polars' own text of an expression still names what `by_numbers` looks for."""
    condition = pl.sql_expr(f"max(reward) OVER (PARTITION BY {column}) > 0 AND {column} <> 'a'")
    found, names = by_numbers(condition)
    assert names == [column]
    assert set(found.meta.root_names()) == {"reward", column, f"number of {column}"}
    other = pl.sql_expr("max(reward) OVER (PARTITION BY agent) > 0")
    assert by_numbers(other)[1] == []


def test_windows_see_groups_whose_trajectories_are_apart(tmp_path):
    rewards = {("a", 0): 1.0, ("b", 0): 0.0, ("a", 1): 0.0, ("c", 0): 0.5, ("b", 1): 0.25}
    table = pa.table(
        {
            "instance_id": [name for name, _ in rewards],
            "repetition_id": pa.array([i for _, i in rewards], pa.int32()),
            "trajectory_id": [f"{name}_{i}" for name, i in rewards],
            "step_index": pa.array([0] * 5, pa.int32()),
            "is_last_step": [True] * 5,
            "prompt_token_ids": pa.array([[1]] * 5, pa.list_(pa.int32())),
            "response_ids": pa.array([[2]] * 5, pa.list_(pa.int32())),
            "loss_mask": [[True]] * 5,
            "reward": list(rewards.values()),
            "token_source": ["engine"] * 5,
        }
    )
    with RolloutWriter(tmp_path / "ds") as writer:
        writer.write(table)
    index = TrajectoryIndex.read(tmp_path / "ds")
    kept = index.matching("max(reward) OVER (PARTITION BY instance_id) < 0.5")
    assert kept.tolist() == [False, True, False, False, True]
    kept = index.matching("reward < avg(reward) OVER (PARTITION BY instance_id)")
    assert kept.tolist() == [False, True, True, False, False]


def test_a_filter_may_use_what_the_table_computes(ask, shop):
    expected = trajectories_of(shop).filter((pl.col("return") >= 0.5) & (pl.col("num_rows") < 4))
    condition = '"return" >= 0.5 AND num_rows < 4'
    found = ask(f"{ROOT}/trajectories", where=condition, limit=1000)
    assert found["trajectory_id"].to_list() == expected["trajectory_id"].to_list() != []
    long = condition + " AND response_text IS NOT NULL"  # read from disk
    assert ask(f"{ROOT}/trajectories", where=long, limit=1000).equals(found)


@pytest.mark.parametrize("descending", [0, 1])
@pytest.mark.parametrize("column", ["return", "response_tokens", "stop_reason", "style"])
def test_windows_are_those_of_a_stable_sort(ask, shop, column, descending):
    expected = trajectories_of(shop).sort(
        column, descending=bool(descending), nulls_last=True, maintain_order=True
    )
    windows = [
        ask(f"{ROOT}/trajectories", sort=column, descending=descending, offset=at, limit=17)
        for at in (0, 17, 34, 51)
    ]
    assert [len(window) for window in windows] == [17, 17, 14, 0]
    ids = pl.concat(windows)["trajectory_id"].to_list()
    assert ids == expected["trajectory_id"].to_list()


def test_histograms_count_every_trajectory(ask, shop):
    table = trajectories_of(shop)
    found = ask(f"{ROOT}/histogram", column="response_tokens", bins=7, where="return > 0")
    values = table["response_tokens"].to_numpy()
    assert found["edges"] == np.histogram_bin_edges(values, 7).tolist()
    assert found["counts_all"] == np.histogram(values, 7)[0].tolist()
    kept = table.filter(pl.col("return") > 0)
    assert found["counts"] == np.histogram(kept["response_tokens"], found["edges"])[0].tolist()
    texts = ask(f"{ROOT}/histogram", column="stop_reason")
    counted = dict(zip(texts["values"], texts["counts_all"], strict=True))
    assert counted == dict(table["stop_reason"].value_counts().rows())
    assert texts["nulls"] == texts["others"] == 0


def test_tokens_are_those_of_200_random_places(ask, viewed, tokenizer):
    number, path = viewed
    rows = place_rewards(scan(path)).collect()
    chosen = np.random.default_rng(5).integers(0, len(rows), 40)
    checked = 0
    for row in rows[chosen].to_dicts():
        key = {name: row[name] for name in ("trajectory_id", "step_index")}
        found = ask(f"/api/datasets/{number}/tokens", **key)
        num_prompt = len(row["prompt_token_ids"])
        nothing = [None] * num_prompt
        assert found["id"].to_list() == row["prompt_token_ids"] + row["response_ids"]
        assert found["trained"].to_list() == [False] * num_prompt + row["loss_mask"]
        assert found["is_response"].sum() == len(row["response_ids"])
        logprobs = pl.Series(nothing + row["rollout_logprobs"], dtype=pl.Float32)
        assert found["rollout_logprob"].equals(logprobs, null_equal=True)
        assert found["reward"].to_list() == nothing + row["rewards"]
        sampled = np.full(len(row["response_ids"]), row.get("segments") is None)
        for segment in row.get("segments") or ():
            sampled[segment["start"] : segment["start"] + segment["length"]] = True
        assert found["sampled"].to_list() == [False] * num_prompt + sampled.tolist()
        assert b"".join(found["bytes"]).decode() == tokenizer.decode(found["id"].to_list())
        checked += len(found)
    assert checked > 200


def test_a_row_says_its_prompt_and_number_of_steps(ask, shop):
    row = scan(shop).filter(pl.col("step_index") == 2).first().collect().to_dicts()[0]
    table = ask.table(f"{ROOT}/tokens", trajectory_id=row["trajectory_id"], step_index=2)
    num_steps = scan(shop).filter(trajectory_id=row["trajectory_id"]).collect().height
    metadata = {key.decode(): json.loads(value) for key, value in table.schema.metadata.items()}
    returns = trajectory_returns(scan(shop)).filter(trajectory_id=row["trajectory_id"]).collect()
    assert metadata == {
        "prompt_tokens": len(row["prompt_token_ids"]),
        "num_steps": num_steps,
        "return": returns["return"].item(),
        "decoded": 1,
        "pictures": [],
    }
    assert table.schema.field("bytes").type == pa.binary()


def test_a_sampled_turn_has_its_tokens_and_stop_reason(ask, shop):
    rows = scan(shop).filter(trajectory_id="shop-1_2").collect()
    (lane,) = ask(f"{ROOT}/conversation", trajectory_id="shop-1_2")["lanes"]
    facts = {(t["num_tokens"], t["stop_reason"]) for t in lane["turns"] if t["role"] != "assistant"}
    assert facts == {(None, None)}
    sampled = [t for t in lane["turns"] if t["num_tokens"] is not None]
    assert [t["num_tokens"] for t in sampled] == rows["response_ids"].list.len().to_list()
    assert [t["stop_reason"] for t in sampled] == rows["stop_reason"].to_list()
    assert {"length", "stop"} <= set(rows["stop_reason"])


def test_attempts_part_at_their_first_other_token(ask, shop):
    found = ask(f"{ROOT}/group", instance_id="shop-1")["attempts"]
    rows = scan(shop).filter(instance_id="shop-1").collect()
    first = rows.filter(trajectory_id="shop-1_0")
    assert [attempt["repetition_id"] for attempt in found] == [0, 1, 2, 3]
    assert found[0]["parts_at"] is None
    for attempt in found[1:]:
        own = rows.filter(trajectory_id=attempt["trajectory_id"])
        place = attempt["parts_at"]
        for row in range(place["row"]):
            assert own["response_ids"][row].equals(first["response_ids"][row])
        prompt, response = (own[n][place["row"]] for n in ("prompt_token_ids", "response_ids"))
        at = place["token"] - len(prompt)
        other = first["response_ids"][place["row"]]
        assert response[:at].equals(other[:at])
        assert response[at] != (other[at] if at < len(other) else None)


def test_merging_changes_no_number_of_a_diff(ask):
    found = ask("/api/diff", a="d0", b="d1")
    for name in ("num", "return", "solved", "response_tokens"):
        assert found[f"{name}_a"].to_list() == found[f"{name}_b"].to_list(), name
    for task in found["task_instance_id"]:
        pairs = ask("/api/diff/pair", a="d0", b="d1", task=task)["pairs"]
        assert [pair["parts_at"] for pair in pairs] == [None] * 4


def test_the_diff_has_the_means_of_tasks(ask, shop):
    found = ask("/api/diff", a="d0", b="d1")
    means = (
        trajectories_of(shop)
        .group_by("instance_id", maintain_order=True)
        .agg(
            num_a=pl.len(),
            return_a=pl.col("return").mean(),
            solved_a=(pl.col("return") > 0).sum(),
            response_tokens_a=pl.col("response_tokens").mean(),
        )
    )
    same(found, means.rename({"instance_id": "task_instance_id"}))
    assert found["return_b"].equals(found["return_a"].alias("return_b"))  # a merge keeps returns
    table = ask.table("/api/diff", a="d0", b="d1", where="instance_id = 'shop-1'")
    assert table.num_rows == 1
    assert table.schema.metadata == {b"only_a": b"0", b"only_b": b"0"}


@pytest.mark.parametrize("of", [{"trajectory_id": "shop-0_1"}, {"instance_id": "shop-0"}])
def test_the_tree_holds_each_row_along_one_path(ask, shop, of, tokenizer):
    nodes = ask(f"{ROOT}/tree", **of)["nodes"]
    column, value = next(iter(of.items()))
    rows = scan(shop).filter(pl.col(column) == value).collect()
    returns = dict(
        trajectory_returns(scan(shop)).select("trajectory_id", "return").collect().rows()
    )
    by_id = {node["id"]: node for node in nodes}
    for node in nodes:
        assert node["start"] < node["end"]
        assert node["start"] == (0 if node["parent"] is None else by_id[node["parent"]]["end"])
        names = {name for name, _ in node["rows"]}
        assert node["num_trajectories"] == len(names)
        assert node["return"] == sum(returns[name] for name in names) / len(names)
    distinct = set()
    for row in rows.to_dicts():
        tokens = row["prompt_token_ids"] + row["response_ids"]
        key = [row["trajectory_id"], row["step_index"]]
        path = sorted((n for n in nodes if key in n["rows"]), key=lambda node: node["start"])
        assert [node["end"] for node in path[:-1]] == [node["start"] for node in path[1:]]
        assert path[-1]["end"] == len(tokens)
        for node in path:
            text = tokenizer.decode(tokens[node["start"] : node["end"]])
            assert text.startswith(node["text"].rstrip("\ufffd"))
            distinct |= {tuple(tokens[: end + 1]) for end in range(node["start"], node["end"])}
            if node["start"] >= len(row["prompt_token_ids"]):
                assert node["sampled"]
    assert ask(f"{ROOT}/tree", **of)["num_tokens"] == len(distinct)


@pytest.mark.slow
def test_the_tree_names_the_causes_of_drift(ask, shop, smollm2_dir):
    breaks = drift(scan(shop), smollm2_dir).collect()
    for instance_id in scan(shop).select("instance_id").unique().collect()["instance_id"]:
        nodes = ask(f"{ROOT}/tree", instance_id=instance_id)["nodes"]
        told = {(n["start"], n["cause"], *row) for n in nodes if n["cause"] for row in n["rows"]}
        own = breaks.filter(pl.col("trajectory_id").str.starts_with(f"{instance_id}_"))
        rows = own.select("token_index", "cause", "trajectory_id", "step_index").rows()
        assert {row[:2] for row in rows} == {one[:2] for one in told}
        assert set(rows) <= told


def test_a_text_is_found_where_its_bytes_are(ask, shop, tokenizer):
    found = ask(f"{ROOT}/search", text="The answer", limit=10_000)
    assert found["complete"]
    assert found["hits"]
    rows = {(r["trajectory_id"], r["step_index"]): r for r in scan(shop).collect().to_dicts()}
    for hit in found["hits"]:
        row = rows[hit["trajectory_id"], hit["step_index"]]
        ids = row["prompt_token_ids"] + row["response_ids"]
        rest = ids[hit["position"] :]
        assert 0 <= tokenizer.decode(rest).find("The answer") < len(tokenizer.decode(rest[:1]))
    whole = {
        row["trajectory_id"]
        for row in rows.values()
        if "The answer" in tokenizer.decode(row["prompt_token_ids"] + row["response_ids"])
    }
    assert {hit["trajectory_id"] for hit in found["hits"]} == whole


def test_tasks_are_listed_by_the_spread_of_their_returns(ask, shop):
    found = ask(f"{ROOT}/tasks", limit=200)
    returns = trajectory_returns(scan(shop)).group_by("instance_id").agg("return").collect()
    known = dict(returns.rows())
    assert found["total"] == len(found["tasks"]) == len(known) == 12
    for task in found["tasks"]:
        values = known[task["instance_id"]]
        assert task["attempts"] == task["num_returns"] == len(values)
        assert task["spread"] == max(values) - min(values)
        assert task["mean"] == pytest.approx(np.mean(values))
    spreads = [task["spread"] for task in found["tasks"]]
    assert spreads == sorted(spreads)
    assert spreads[0] < spreads[-1]
    few = ask(f"{ROOT}/tasks", limit=3)
    assert (few["tasks"], few["total"]) == (found["tasks"][:3], 12)


def test_a_task_with_one_known_return_has_no_spread():
    frame = pl.DataFrame(
        {
            "instance_id": ["a", "a", "b", "b", "c"],
            "return": [1.0, None, 2.0, 5.0, math.nan],
            "task_text": [None] * 5,
        }
    )
    names = ("instance_id", "attempts", "num_returns", "mean", "spread")
    found = [tuple(task[name] for name in names) for task in tasks(frame, 9)["tasks"]]
    assert found == [("b", 2, 2, 3.5, 3.0), ("a", 2, 1, 1.0, None), ("c", 1, 0, None, None)]


def test_ids_are_found_in_the_whole_dataset(ask, shop):
    rows = scan(shop).collect()
    where = "instance_id = 'shop-2'"
    found = ask(f"{ROOT}/search", text="SHOP-1", where=where)
    assert found["searched"] == rows.filter(instance_id="shop-2")["trajectory_id"].n_unique() == 4
    tasks = {name: 4 for name in rows["instance_id"].unique() if "shop-1" in name}
    assert len(tasks) == found["num_tasks"] > 1
    assert {task["instance_id"]: task["attempts"] for task in found["tasks"]} == tasks
    assert found["tasks"][0]["instance_id"] == "shop-1"
    assert (found["trajectories"], found["num_trajectories"]) == ([], 0)
    found = ask(f"{ROOT}/search", text="-7_2")
    assert (found["tasks"], found["trajectories"]) == ([], ["shop-7_2"])
    assert found["searched"] == 48
    found = ask(f"{ROOT}/search", ids="7")
    assert (found["num_tasks"], found["num_trajectories"]) == (0, 0)
    found = ask(f"{ROOT}/search", text="_")
    assert (len(found["trajectories"]), found["num_trajectories"]) == (20, 48)


def test_ids_are_found_once_where_they_were_first_sampled(ask, shop):
    row = scan(shop).filter(trajectory_id="shop-2_0", step_index=0).collect().to_dicts()[0]
    ids = row["response_ids"][3:9]
    found = ask(f"{ROOT}/search", ids=",".join(map(str, ids)), where="instance_id = 'shop-2'")
    hits = [h for h in found["hits"] if h["trajectory_id"] == "shop-2_0"]
    position = len(row["prompt_token_ids"]) + 3
    assert [(h["step_index"], h["position"]) for h in hits] == [(0, position)]


def bare(text):
    return "".join(text.split())


def test_the_conversation_says_everything_once(ask, shop):
    for name in ("shop-0_0", "shop-0_1", "shop-7_2"):
        rows = scan(shop).filter(trajectory_id=name).collect()
        found = ask(f"{ROOT}/conversation", trajectory_id=name)
        assert [lane["agent"] for lane in found["lanes"]] == rows["agent"].unique(
            maintain_order=True
        ).to_list()
        turns = [turn for lane in found["lanes"] for turn in lane["turns"]]
        answers = [t for t in turns if t["role"] == "assistant" and t["trained"]]
        texts = ["".join(part["text"] for part in turn["parts"]) for turn in answers]
        assert len(texts) == len(rows)
        assert sorted(map(bare, texts)) == sorted(map(bare, rows["response_text"]))
        assert all(turn["is_new"] for turn in turns)  # the harness only appends
        assert sum(turn["role"] == "system" for turn in turns) == len(found["lanes"])


def test_merged_rows_tell_the_same_conversation(ask):
    for name in ("shop-0_0", "shop-3_1"):
        told = [ask(f"/api/datasets/{n}/conversation", trajectory_id=name) for n in ("d0", "d1")]
        spoken = [
            sorted(
                (lane["agent"], turn["role"], str(turn["parts"]))
                for lane in one["lanes"]
                for turn in lane["turns"]
                if turn["role"] == "assistant" and turn["trained"]
            )
            for one in told
        ]
        assert spoken[0] == spoken[1]


def test_sources_describe_the_datasets(ask):
    found = ask("/api/sources")
    assert [d["id"] for d in found["datasets"]] == ["d0", "d1"]
    first = found["datasets"][0]
    counts = {"num_rows": 205, "num_trajectories": 48, "num_groups": 12, "layout": "prefix"}
    assert {name: first[name] for name in counts} == counts
    own = [column for column in first["columns"] if column["own"]]
    assert own == [{"name": "style", "kind": "text", "own": True}]
    assert (found["runs"], found["warnings"]) == ([], [])


def test_a_question_about_nothing_is_an_error(ask):
    for path, parameters in (
        (f"{ROOT}/tokens", {"trajectory_id": "none"}),
        (f"{ROOT}/tokens", {"trajectory_id": "shop-0_0", "step_index": 99}),
        (f"{ROOT}/group", {"instance_id": "none"}),
        (f"{ROOT}/histogram", {"column": "none"}),
        (f"{ROOT}/trajectories", {"sort": "none"}),
        (f"{ROOT}/trajectories", {"limit": "-1"}),
        (f"{ROOT}/search", {}),
        (f"{ROOT}/search", {"ids": "1;2"}),
        ("/api/runs/r0/metrics", {}),
    ):
        with pytest.raises(RolloutError):
            ask(path, **parameters)
