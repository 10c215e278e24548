import contextlib
import io
import json
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings

from rollout_io import RolloutWriter
from rollout_io.cli.main import run
from schemas import RULES
from schemas.columns import arrow_schema
from schemas.metadata import DatasetMetadata
from schemas.strategies import broken_tables
from tests.helpers.examples import examples


def validate(path):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = run(["validate", str(path), "--json"])
    return code, json.loads(out.getvalue())


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_validate_names_rule_row_and_trajectory_of_a_broken_file_and_exits_1(rule):
    @given(broken_tables(rule))
    @settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=examples(16))
    def holds(table):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "part-00000.parquet"
            pq.write_table(table, file)
            code, report = validate(file)
        is_error = RULES[rule].severity == "error"
        assert (code, report["ok"]) == (int(is_error), not is_error)
        assert [entry["rule"] for entry in report["rules"]] == [rule]
        assert report["rules"][0]["hint"]
        of_table = rule in ("columns_and_types", "mask_trains_something")
        for breach in report["breaches"]:
            assert of_table or breach["row"] is not None
            assert of_table or breach["trajectory_id"]

    holds()


@pytest.mark.parametrize(("outcome", "rules"), [("last", ["outcome_on_last_step"]), ("sum", [])])
def test_a_last_step_without_a_reward_is_no_breach_where_returns_are_sums(outcome, rules, tmp_path):
    steps = arrow_schema(("reward",))
    rows = [
        {"step_index": 0, "is_last_step": False, "prompt_token_ids": [1], "reward": 1.0},
        {"step_index": 1, "is_last_step": True, "prompt_token_ids": [1, 2, 3], "reward": 0.0},
    ]
    usual = {"instance_id": "a", "trajectory_id": "a_0", "repetition_id": 0, "response_ids": [2]}
    usual |= {"loss_mask": [True], "token_source": "engine"}
    with RolloutWriter(tmp_path / "ds", metadata=DatasetMetadata(outcome=outcome)) as writer:
        writer.write(pa.Table.from_pylist([usual | row for row in rows], steps))
    code, report = validate(tmp_path / "ds")
    assert (code, [entry["rule"] for entry in report["rules"]]) == (0, rules)
