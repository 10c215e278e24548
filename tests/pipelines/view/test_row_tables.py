"""Verdicts of an audit and shares of an update are shown with the rows that they are about."""

import json

import polars as pl
import pyarrow.parquet as pq
import pytest

from pipelines.view.export import export, key_of
from rollout_io.cli.main import run as main
from schemas.errors import RolloutError
from tests.helpers.findings_helpers import (
    ROWS,
    share,
    verdict,
    write_dataset,
    write_shares,
    write_verdicts,
)
from tests.helpers.report_helpers import answers_in, bits_of
from tests.helpers.view_helpers import Asked, bundle_in

SHARES = (0.5, 0.25, -0.75, 1.0)
STALE = {"kind": "version", "labelled_version": 5, "best_version": 3, "log_likelihood_ratio": 40.0}
SWAP = {"kind": "swap", "start": 1, "swap_position": 2, "log_likelihood_ratio": 12.5}
TOKENS, TABLE = "/api/datasets/d0/tokens", "/api/datasets/d0/trajectories"
VERDICTS, SOURCES = "/api/datasets/d0/verdicts", "/api/sources"


def verdicts_of(dataset, **changed):
    """A version and a swap in t_0, a clean row of t_1, and a row of u_0 that is too short."""
    return [
        verdict(dataset, *ROWS[0], **{**STALE, **changed}),
        verdict(dataset, *ROWS[1]),
        verdict(dataset, *ROWS[0], **SWAP, span=1),
        verdict(dataset, *ROWS[2]),
        verdict(dataset, *ROWS[3], kind="too_short"),
    ]


def shares_of(dataset, **changed):
    rows = [share(dataset, *row, value) for row, value in zip(ROWS, SHARES, strict=True)]
    return [{**rows[0], **changed}, *rows[1:]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("findings")
    dataset = write_dataset(found / "ds")
    write_verdicts(found / "verdicts.parquet", verdicts_of(dataset))
    write_shares(found / "blame.parquet", shares_of(dataset), gradient_norm=[1.0, 2.0, 3.0, 4.0])
    return found


@pytest.fixture(scope="module", params=[0, 1, 2])
def ask(folder, request):
    """The dataset and both tables, in any order."""
    paths = [folder / "ds", folder / "verdicts.parquet", folder / "blame.parquet"]
    return Asked(*paths[request.param :], *paths[: request.param])


def test_the_table_has_faults_and_shares(ask):
    found = ask(TABLE)
    assert found["trajectory_id"].to_list() == ["t_0", "t_1", "u_0"]
    assert found["faults"].to_list() == ["version, swap", "none", None]
    assert found["fault_nats"].to_list() == [40.0, None, None]
    assert found["share_of_update_3"].to_list() == [0.75, -0.75, 1.0]
    ranked = ask(TABLE, sort="share_of_update_3", descending=1)
    assert ranked["trajectory_id"].to_list() == ["u_0", "t_0", "t_1"]
    for where, names in (
        ("faults LIKE '%swap%'", ["t_0"]),
        ("faults = 'none'", ["t_1"]),
        ("faults IS NULL AND share_of_update_3 > 0.8", ["u_0"]),
        ("fault_nats > 20 AND return > 0", ["t_0"]),
    ):
        assert ask(TABLE, where=where)["trajectory_id"].to_list() == names
    counts = ask("/api/datasets/d0/histogram", column="faults")
    assert dict(zip(counts["values"], counts["counts"], strict=True)) == {
        "none": 1,
        "version, swap": 1,
    }


def test_a_row_has_its_spans_in_order(ask):
    first, second = ask(VERDICTS, trajectory_id="t_0", step_index=0)["spans"]
    assert (first["kind"], first["start"], first["end"]) == ("version", 0, 4)
    assert first["is_fault"]
    assert first["meaning"] == "sampled by other weights than labelled"
    assert (first["labelled_version"], first["best_version"]) == (5, 3)
    assert (second["kind"], second["start"], second["swap_position"]) == ("swap", 1, 2)
    (clean,) = ask(VERDICTS, trajectory_id="t_0", step_index=1)["spans"]
    assert not clean["is_fault"]


def test_tokens_have_their_shares(ask):
    for row, value in zip(ROWS, SHARES, strict=True):
        expected = share("", *row, value)["token_shares"]
        assert sum(expected) == value
        found = ask(TOKENS, trajectory_id=row[0], step_index=row[1])["share_of_update_3"]
        assert found.to_list() == [None] * 3 + expected  # powers of two: exact in float32


def test_the_rows_of_an_update_are_ranked_by_the_size_of_their_share(ask):
    (entry,) = ask(SOURCES)["shares"]
    assert (entry["update"], entry["run"], entry["column"]) == (3, None, "share_of_update_3")
    found = ask("/api/shares/s0", limit=3)
    assert found["share"].to_list() == [1.0, -0.75, 0.5]
    assert found["gradient_norm"].to_list() == [4.0, 3.0, 1.0]
    assert set(found["dataset"]) == {"d0"}
    assert ask.table("/api/shares/s0", limit=3).schema.metadata[b"total"] == b"4"
    with pytest.raises(RolloutError, match="no_such_path"):
        ask("/api/shares/s1")


CHANGED_VERDICTS = {
    "another response": {"row_digest": 25},
    "a shorter response": {"num_response_tokens": 3},
    "a span beyond the response": {"end": 5},
    "a swap outside its span": {"swap_position": 5},
    "a row that the dataset lacks": {"step_index": 7},
}


@pytest.mark.parametrize("change", CHANGED_VERDICTS.values(), ids=CHANGED_VERDICTS)
def test_verdicts_about_changed_rows_are_not_shown(folder, tmp_path, change):
    rows = verdicts_of(folder / "ds", **change)
    ask = Asked(folder / "ds", write_verdicts(tmp_path / "v.parquet", rows))
    (warning,) = [text for text in ask(SOURCES)["warnings"] if "v.parquet" in text]
    step = change.get("step_index", 0)
    assert "are not shown because ds is another dataset, or was changed: " in warning
    assert warning.endswith(f"the first in trajectory t_0, step {step}.")
    assert "faults" not in ask(TABLE).columns
    assert ask(VERDICTS, trajectory_id="t_1", step_index=0)["spans"] == []


@pytest.mark.parametrize("change", [{"row_digest": 25}, {"token_shares": [0.5]}])
def test_shares_of_changed_rows_are_not_shown(folder, tmp_path, change):
    path = write_shares(tmp_path / "b.parquet", shares_of(folder / "ds", **change))
    ask = Asked(folder / "ds", path)
    assert any("1 of 4 rows differ" in text for text in ask(SOURCES)["warnings"])
    assert "share_of_update_3" not in ask(TABLE).columns
    assert "share_of_update_3" not in ask(TOKENS, trajectory_id="t_1").columns
    assert ask("/api/shares/s0")["dataset"].to_list() == [None] * 4


def test_tables_follow_a_dataset_that_was_moved_but_not_another_one(folder, tmp_path):
    gone = write_verdicts(tmp_path / "gone.parquet", verdicts_of("/gone/ds"))
    ask = Asked(folder / "ds", gone)
    assert ask(TABLE)["faults"].to_list() == ["version, swap", "none", None]
    other = write_dataset(tmp_path / "other")  # has the same rows, but is not the audited dataset
    ask = Asked(other, folder / "verdicts.parquet")
    assert "faults" not in ask(TABLE).columns
    assert any("that dataset is not open" in text for text in ask(SOURCES)["warnings"])
    ask = Asked(folder / "ds", other, gone)
    assert any("2 open datasets have these rows" in text for text in ask(SOURCES)["warnings"])


def test_a_run_opens_its_tables_with_the_iterations_that_they_name(tmp_path):
    """Iterations repeat the ids of their trajectories; here, some of their tokens, too."""
    run = tmp_path / "run"
    responses = {0: ROWS, 1: (ROWS[0], ("t_0", 1, [8, 8]), *ROWS[2:])}
    paths = {k: run / "rollouts" / f"iteration_{k:05}" for k in responses}
    for k, path in paths.items():
        write_dataset(path, responses[k])
    (run / "metrics.jsonl").write_text('{"global_step": 3, "loss": 1.0}\n')
    (run / "audit").mkdir()
    write_verdicts(run / "audit" / "i1.parquet", [verdict(paths[1], *ROWS[0], **STALE)])
    moved = f"elsewhere/rollouts/{paths[0].name}"
    write_shares(run / "blame" / "update_3.parquet", shares_of(moved))
    (run / "audit" / "broken.parquet").write_bytes(b"PAR1")
    ask = Asked(run)
    told = ask(SOURCES)
    assert [one["run"] for one in told["shares"]] == ["r0"]
    assert any("broken.parquet" in text for text in told["warnings"])
    assert [dataset["num_verdicts"] for dataset in told["datasets"]] == [0, 1]
    for number, is_audited in (("d0", False), ("d1", True)):
        columns = ask(f"/api/datasets/{number}/trajectories").columns
        assert ("faults" in columns) == is_audited
        assert ("share_of_update_3" in columns) != is_audited
        answer = ask(f"/api/datasets/{number}/verdicts", trajectory_id="t_0", step_index=0)
        assert len(answer["spans"]) == int(is_audited)
    assert set(ask("/api/shares/s0")["dataset"]) == {"d0"}


def test_shares_belong_to_the_run_that_they_name(folder, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"global_step": 3, "loss": 1.0}\n')
    (run / "config.json").write_text(json.dumps({"data": {"dataset": str(folder / "ds")}}))
    for name, expected in ((str(run), "r0"), ("gone/run", "r0"), ("gone/other", None)):
        rows = [{**row, "run": name} for row in shares_of(folder / "ds")]
        ask = Asked(run, write_shares(tmp_path / "b.parquet", rows))
        told = ask(SOURCES)
        assert [one["run"] for one in told["shares"]] == [expected]
        has_warning = any("the run gone/other, which is not open" in w for w in told["warnings"])
        assert has_warning == (expected is None)


def test_two_updates_have_a_column_each(folder, tmp_path):
    dataset = folder / "ds"
    rows = shares_of(dataset) + [{**row, "global_step": 4} for row in shares_of(dataset)[:1]]
    again = write_shares(tmp_path / "again.parquet", shares_of(dataset)[1:])
    ask = Asked(dataset, write_shares(tmp_path / "b.parquet", rows), again)
    found = ask(TABLE)
    assert found["share_of_update_3"].to_list() == [0.75, -0.75, 1.0]
    assert found["share_of_update_4"].to_list() == [0.5, None, None]
    assert found["share_of_update_3_2"].to_list() == [0.25, -0.75, 1.0]
    assert "share_of_update_4" not in ask(TOKENS, trajectory_id="u_0").columns


def test_values_of_another_type_are_refused_and_harmless_ones_are_cast(folder, tmp_path):
    frame = pl.read_parquet(folder / "verdicts.parquet")
    out = tmp_path / "v.parquet"
    frame.cast({"start": pl.Int64, "step_index": pl.UInt8}).write_parquet(out)
    assert Asked(folder / "ds", out)(TABLE)["faults"].to_list()[0] == "version, swap"
    for column, kind in (("start", pl.Float64), ("row_digest", pl.String), ("kind", pl.Int32)):
        values = pl.Series(column, [1] * len(frame)).cast(kind)
        frame.with_columns(values).write_parquet(out)
        with pytest.raises(RolloutError, match=rf"{column} has the type {kind}.*\[view_table\]"):
            Asked(folder / "ds", out)
    frame.with_columns(kind=pl.lit(None, pl.String)).write_parquet(out)
    with pytest.raises(RolloutError, match=r"the column kind has nulls. \[view_table\]"):
        Asked(folder / "ds", out)
    rows = shares_of(folder / "ds")
    with pytest.raises(RolloutError, match=r"t_0, step 0, has several shares.*\[view_table\]"):
        Asked(folder / "ds", write_shares(tmp_path / "b.parquet", [*rows, rows[0]]))


@pytest.mark.parametrize(
    ("dropped", "words"),
    [
        (["row_digest"], "looks like a table of verdicts, but has no column row_digest"),
        (["row_digest", "kind", "span", "start", "end", "dataset"], "neither a dataset nor"),
    ],
)
def test_another_parquet_file_is_refused(folder, tmp_path, dropped, words, capsys):
    table = pq.read_table(folder / "verdicts.parquet")
    pq.write_table(table.drop_columns(dropped), tmp_path / "other.parquet")
    assert main(["view", str(folder / "ds"), str(tmp_path / "other.parquet")]) == 1
    said = capsys.readouterr().err
    assert words in said
    assert "[view_table]" in said
    assert "Hint: pass a dataset, a run, or a table written by" in said


def test_a_column_that_cannot_be_exported_is_left_out(folder, tmp_path):
    columns = {"norm\0": [1.0] * 4, "<b>norm</b>": [2.0] * 4, "note": ["text"] * 4}
    path = write_shares(tmp_path / "b.parquet", shares_of(folder / "ds"), **columns)
    found = Asked(folder / "ds", path)("/api/shares/s0")
    assert found.columns[-2:] == ["share", "<b>norm</b>"]


def test_a_table_without_its_dataset_is_refused(folder):
    with pytest.raises(
        RolloutError, match=r"can be shown only with its dataset or run. \[view_table\]"
    ):
        Asked(folder / "verdicts.parquet")


def test_columns_of_the_dataset_with_these_names_are_named(tmp_path):
    dataset = write_dataset(tmp_path / "ds", faults=["mine"] * 4)
    ask = Asked(dataset, write_verdicts(tmp_path / "v.parquet", verdicts_of(dataset)))
    assert ask(TABLE)["faults"].to_list() == ["version, swap", "none", None]
    assert any("the column faults is not shown" in text for text in ask(SOURCES)["warnings"])
    with pytest.raises(RolloutError, match=r"one that the viewer computes. \[condition\]"):
        ask(TABLE, where="faults = 'mine'")


def test_a_report_holds_verdicts_and_shares(ask, tmp_path):
    bundle, out = bundle_in(tmp_path / "bundle"), tmp_path / "report.html"
    export(ask.sources, bundle, str(out), where="faults LIKE '%swap%'", limit=5)
    answers = answers_in(out)
    for step in (0, 1):
        of = {"trajectory_id": "t_0", "step_index": step}
        assert json.loads(answers[key_of(VERDICTS, **of)]) == ask(VERDICTS, **of)
        served = ask.table(TOKENS, **of)
        assert bits_of(answers[key_of(TOKENS, **of)]) == bits_of(served)
    assert key_of(VERDICTS, trajectory_id="t_1", step_index=0) not in answers
    shares = answers[key_of("/api/shares/s0", limit=100)]
    assert shares.column("share").to_pylist() == [1.0, -0.75, 0.5, 0.25]
