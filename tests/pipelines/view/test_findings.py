"""The viewer shows findings by trajectory, turn and token, of merged rows as of steps."""

import shutil

import polars as pl
import pyarrow.compute as pc
import pytest
from hypothesis import given

from pipelines import merge, merge_table, unmerge_table
from pipelines.rescoring.finders import FINDERS
from pipelines.rescoring.rescore import rescore
from pipelines.rescoring.scorers import Scorer
from pipelines.view.annotations import _rows_of_steps
from rollout_io import RolloutWriter, scan
from schemas.metadata import DatasetMetadata
from schemas.strategies import rollout_tables
from tests.helpers.filter_helpers import relaxed
from tests.helpers.view_helpers import Asked

ROOT = "/api/datasets/d0"
FUNCTIONS = """
def places(attempt):
    step = len(attempt.rows) - 1
    text, prompt = attempt.rows[step]["response_text"], attempt.num_prompt_tokens[step]
    middle = len(text) // 2
    return [
        {"label": "whole", "text": "all of it"},
        {"label": "tokens", "step": step, "start": prompt + 1, "length": 2},
        {"label": "said", "text": text[middle:], "step": step, "text_start": middle, "text_length": len(text) - middle},
        {"label": "first", "step": 0},
    ]


def nothing(attempt):
    return []
"""


@pytest.fixture
def found(shop, smollm2_dir, tmp_path, monkeypatch):
    """A group of the shop as steps and merged, with findings beside both."""
    (tmp_path / "own_places.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    rows = scan(shop).filter(instance_id="shop-1")
    for name, frame in {"steps": rows, "merged": merge(rows)}.items():
        with RolloutWriter(tmp_path / name, metadata=DatasetMetadata()) as writer:
            writer.write(frame.collect())
        scorer = Scorer(function="own_places:places", gives="findings")
        rescore(str(tmp_path / name), "places", scorer)
    return [Asked(tmp_path / name, tokenizer=str(smollm2_dir)) for name in ("steps", "merged")]


@pytest.mark.slow
def test_a_finding_is_placed_at_the_same_tokens_of_steps_and_of_merged_rows(found):
    for ask in found:
        lines = ask.sources.datasets["d0"].findings
        for name in ask(f"{ROOT}/trajectories")["trajectory_id"]:
            for one in lines.of(ask.sources.datasets["d0"], name):
                if one["label"] == "said":
                    tokens = ask(f"{ROOT}/tokens", trajectory_id=name, step_index=one["row"])
                    prompt = int((~tokens["is_response"]).sum())
                    spelled = tokens["bytes"][prompt + one["start"] : prompt + one["end"]]
                    assert one["text"] in b"".join(spelled).decode("utf-8", "replace")
                    assert one["end"] > one["start"]
    shown = []
    for ask in found:
        tokens = {}
        for name in ask(f"{ROOT}/trajectories")["trajectory_id"]:
            for row in range(
                len(scan(ask.sources.datasets["d0"].path).filter(trajectory_id=name).collect())
            ):
                answer = ask(f"{ROOT}/verdicts", trajectory_id=name, step_index=row)
                assert answer["spans"] == []
                for one in answer["findings"]:
                    table = ask(f"{ROOT}/tokens", trajectory_id=name, step_index=row)
                    prompt = int((~table["is_response"]).sum())
                    ids = table["id"][prompt + one["start"] : prompt + one["end"]].to_list()
                    tokens[name, one["label"]] = ids
        shown.append(tokens)
    assert shown[0] == shown[1]
    assert {label for _, label in shown[0]} == {"tokens", "said", "first"}


@pytest.mark.slow
@relaxed
@given(rollout_tables())
def test_each_step_is_the_beginning_of_the_row_that_holds_it(rows):
    merged = merge_table(rows)
    for name in pc.unique(merged["trajectory_id"]).to_pylist():
        table = merged.filter(pc.equal(merged["trajectory_id"], name))
        has = "segments" in table.column_names
        segments = table["segments"].to_pylist() if has else [None] * table.num_rows
        steps, row_of = unmerge_table(table), _rows_of_steps(segments)
        assert len(row_of) == steps.num_rows
        whole, parts = (
            [one["prompt_token_ids"] + one["response_ids"] for one in held.to_pylist()]
            for held in (table, steps)
        )
        for part, row in zip(parts, row_of, strict=True):
            assert whole[row][: len(part)] == part


@pytest.mark.slow
def test_turns_and_the_table_name_what_was_found(found):
    for ask in found:
        table = ask(f"{ROOT}/trajectories")
        assert set(table["findings"]) == {"first, said, tokens, whole"}
        assert ask("/api/sources")["datasets"][0]["num_findings"] == 4 * len(table)
        matching = ask(f"{ROOT}/trajectories", where="findings('places/said') = 1")
        assert len(matching) == len(table)
        longest = table.sort("num_turns")["trajectory_id"][-1]
        told = ask(f"{ROOT}/conversation", trajectory_id=longest)
        assert [one["label"] for one in told["findings"]] == ["whole"]
        turns = [turn for lane in told["lanes"] for turn in lane["turns"]]
        labels = {
            number: [one["label"] for one in turn["findings"]]
            for number, turn in enumerate(turns)
            if turn["findings"]
        }
        assert labels == {
            min(n for n, turn in enumerate(turns) if turn["role"] == "assistant"): ["first"],
            max(n for n, turn in enumerate(turns) if turn["role"] == "assistant"): [
                "tokens",
                "said",
            ],
        }


@pytest.mark.usefixtures("found")
def test_findings_of_other_rows_are_not_shown_and_said(tmp_path):
    rows = scan(tmp_path / "steps").collect()
    shutil.rmtree(tmp_path / "steps")
    with RolloutWriter(tmp_path / "steps") as writer:
        writer.write(rows.with_columns(response_text=pl.lit("other")))
    ask = Asked(tmp_path / "steps")
    assert "findings" not in ask(f"{ROOT}/trajectories").columns
    (warning,) = [one for one in ask("/api/sources")["warnings"] if "changed since" in one]
    assert "version of findings places" in warning


@pytest.mark.slow
@pytest.mark.usefixtures("found")
def test_every_finder_runs_on_recorded_trajectories(tmp_path):
    dataset = str(tmp_path / "steps")
    for finder in FINDERS:
        name = finder.__name__
        scorer = Scorer(function=f"{finder.__module__}:{name}", gives="findings")
        assert rescore(dataset, name, scorer).num_errors == 0
