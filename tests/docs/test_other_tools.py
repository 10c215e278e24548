"""Snippets of docs/other_tools.md, run with the real libraries."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings

import rollout_io
from pipelines.merging.merge import merge_table
from pipelines.rewards import trajectory_returns
from schemas.strategies import rollout_tables
from tests.conftest import EXAMPLES
from tests.helpers.examples import examples

PAGE = (Path(__file__).parents[2] / "docs" / "other_tools.md").read_text()
SNIPPETS = {
    re.search(r"import (\w+)", code)[1]: code
    for code in re.findall(r"```python\n(.*?)```", PAGE.partition("## Prompts")[0], re.DOTALL)
}
POLARS_PROMPTS = re.findall(r"```python\n(.*?)```", PAGE.partition("## Prompts")[2], re.DOTALL)[0]
MACRO, QUERY = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)


LAYOUTS = ("prefix", "full")


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Merged calls of the shop with metrics and routes, in each layout."""
    rewards = str(EXAMPLES / "shop.rewards.jsonl")
    steps = rollout_io.read_log([str(EXAMPLES / "shop.calls.jsonl")], rewards=rewards)
    lengths = [
        len(prompt) + len(response)
        for prompt, response in zip(
            steps["prompt_token_ids"].to_pylist(), steps["response_ids"].to_pylist(), strict=True
        )
    ]
    metrics = [[{"key": "turns", "value": 2.0}], None] * len(steps)
    routing = pa.list_(pa.list_(pa.list_(pa.int16(), 2), 1))
    rows = merge_table(
        steps.drop_columns("metrics")
        .append_column("metrics", pa.array(metrics[: len(steps)]))
        .append_column(
            "rollout_expert_indices", pa.array([[[[0, 1]]] * n for n in lengths], routing)
        )
    )
    paths = {layout: tmp_path_factory.mktemp(layout) / "shop" for layout in LAYOUTS}
    for layout, path in paths.items():
        with rollout_io.RolloutWriter(path, layout=layout) as writer:
            writer.write(rows)
    return paths


@pytest.fixture(params=LAYOUTS)
def dataset(request, both):
    return both[request.param]


def on(code, dataset):
    return code.replace('"shop/', f'"{dataset}/').replace("'shop/", f"'{dataset}/")


def run(code, dataset, name="rows"):
    names = {"duckdb": duckdb}
    exec(on(code, dataset), names)
    return names[name]


def stored_names(dataset):
    import pyarrow.parquet as pq

    return pq.read_schema(next(dataset.glob("*.parquet"))).names


AS_ARROW = {
    "polars": lambda rows: rows.collect().to_arrow(),
    "pandas": lambda rows: pa.Table.from_pandas(rows, preserve_index=False),
    "pyarrow": lambda rows: rows,
    "duckdb": lambda rows: rows.to_arrow_table(),
    "daft": lambda rows: rows.to_arrow(),
    "datasets": lambda rows: rows.data.table,
}


@pytest.mark.parametrize("tool", AS_ARROW)
def test_the_tool_opens_a_dataset_with_every_column(tool, dataset, tmp_path, monkeypatch):
    pytest.importorskip(tool)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    found = AS_ARROW[tool](run(SNIPPETS[tool], dataset))
    assert found.column_names == stored_names(dataset)
    expected = rollout_io.read(dataset)
    for name in ("trajectory_id", "response_ids", "rollout_logprobs", "reward", "loss_mask"):
        assert found[name].to_pylist() == expected[name].to_pylist()
    assert plain(found["metrics"]) == plain(expected["metrics"])


def plain(metrics):
    return [None if m is None else [(e["key"], e["value"]) for e in m] for m in metrics.to_pylist()]


RAY = """
import json, sys
import ray
ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
         _node_ip_address="127.0.0.1")
for snippet in sys.argv[1:]:
    exec(snippet)
    values = [(r["trajectory_id"], r["step_index"], r["response_ids"]) for r in rows.take_all()]
    plain = [[i, int(step), [int(token) for token in ids]] for i, step, ids in values]
    print(json.dumps([rows.schema().names, plain]))
"""


@pytest.mark.nightly  # Ray starts for half a minute; the tools above read the same files on every change
def test_ray_data_opens_a_dataset_with_every_column(both):
    snippets = [on(SNIPPETS["ray"], path) for path in both.values()]
    command = [sys.executable, "-W", "ignore", "-c", RAY, *snippets]
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    for path, line in zip(both.values(), done.stdout.splitlines(), strict=True):
        names, rows = json.loads(line)
        assert names == stored_names(path)
        expected = rollout_io.read(path, ("trajectory_id", "step_index", "response_ids"))
        assert sorted(rows) == sorted([*row.values()] for row in expected.to_pylist())


@pytest.mark.slow
@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(table=rollout_tables())
def test_prompts_of_the_prefix_layout_are_rebuilt_bit_for_bit(table, tmp_path_factory):
    path = tmp_path_factory.mktemp("any") / "ds"
    with rollout_io.RolloutWriter(path, layout="prefix") as writer:
        writer.write(table)
    expected = prompts_of(rollout_io.read(path))
    assert prompts_of(run(POLARS_PROMPTS, path).collect().to_arrow()) == expected
    with duckdb.connect() as database:
        database.sql(MACRO)
        shards = f"{path}/*.parquet"
        assert (
            prompts_of(database.table_function("rollouts", [shards]).to_arrow_table()) == expected
        )
        counts = database.sql(QUERY.replace("shop/*.parquet", shards)).fetchall()
    assert {(i, step): n for i, step, n in counts} == {k: len(v) for k, v in expected.items()}


def test_the_query_of_rewards_gives_mean_returns(dataset):
    found = run(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[-1], dataset, name="returns")
    returns = trajectory_returns(rollout_io.scan(dataset)).collect()
    means = returns.group_by("instance_id").agg("return").sort("instance_id")
    expected = [(name, sum(values) / len(values)) for name, values in means.rows()]
    assert found.fetchall() == expected
    assert any(0 < mean < 1 for _, mean in expected)


def prompts_of(table):
    names = ("trajectory_id", "step_index", "prompt_token_ids")
    rows = zip(*(table[name].to_pylist() for name in names), strict=True)
    return {(trajectory, step): prompt for trajectory, step, prompt in rows}
