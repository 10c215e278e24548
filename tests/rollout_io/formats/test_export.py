import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout_io
from rollout_io.cli.export import FORMATS
from rollout_io.cli.main import run
from schemas.columns import routing_type
from schemas.strategies import rollout_tables
from tests.helpers.examples import examples

TOKEN_FORMATS = ("trl", "verl", "slime")
ENDING = {
    "skyrl": "json",
    "trl": "parquet",
    "verl": "parquet",
    "slime": "pt",
    "hf": "folder",
    "session_traces": "dir",
    "parquet": "dir",
    **dict.fromkeys(("sft", "sharegpt", "openai_sft", "dpo", "kto"), "jsonl"),
    **dict.fromkeys(("sft_tokens", "dpo_tokens", "kto_tokens"), "parquet"),
    **dict.fromkeys(("sft_images", "dpo_images", "kto_images"), "parquet"),
}
READ = ("prompt_token_ids", "response_ids", "loss_mask", "rollout_logprobs", "reward")

TRL = {
    "prompt_ids": pa.list_(pa.int32()),
    "completion_ids": pa.list_(pa.int32()),
    "logprobs": pa.list_(pa.float32()),
    "env_mask": pa.list_(pa.int8()),
    "reward": pa.float64(),
    "group_id": pa.int64(),
}
VERL = {
    "prompts": pa.list_(pa.int32()),
    "responses": pa.list_(pa.int32()),
    "response_mask": pa.list_(pa.int8()),
    "rollout_log_probs": pa.list_(pa.float32()),
    "rm_scores": pa.list_(pa.float32()),
    "reward_score": pa.float64(),
    "uid": pa.string(),
    "session_id": pa.int32(),
    "index": pa.int32(),
}
SAMPLE = {
    *("group_index", "index", "rollout_id", "prompt", "tokens", "response", "response_length"),
    *("reward", "loss_mask", "rollout_log_probs", "rollout_routed_experts", "weight_versions"),
    *("remove_sample", "status", "metadata"),
    *("rollout_top_p_token_ids", "rollout_top_p_token_offsets"),
}


def export(dataset, name, folder, *options):
    out = Path(folder) / f"out.{ENDING[name]}"
    assert run(["export", str(dataset), "--format", name, "--out", str(out), *options]) == 0
    return out


def samples_of(file):
    return torch.load(file, weights_only=True)["samples"]


def read_back(name, file):
    """Rows as the table has them, from the names of the peer."""
    if name == "slime":
        return [
            {
                "prompt_token_ids": s["tokens"][: -s["response_length"]],
                "response_ids": s["tokens"][-s["response_length"] :],
                "loss_mask": s["loss_mask"],
                "rollout_logprobs": s["rollout_log_probs"],
                "reward": s["reward"],
            }
            for s in samples_of(file)
            if not s["remove_sample"]
        ]
    names = {
        "trl": ("prompt_ids", "completion_ids", "env_mask", "logprobs", "reward"),
        "verl": ("prompts", "responses", "response_mask", "rollout_log_probs", "reward_score"),
    }[name]
    rows = pq.read_table(file, columns=list(names)).to_pylist()
    return [dict(zip(READ, (row[n] for n in names), strict=True)) for row in rows]


def table_of(errors=(), **columns):
    """Trajectories a_0 (two steps), a_1 and b_0."""
    table = {
        "instance_id": ["a", "a", "a", "b"],
        "repetition_id": pa.array([0, 0, 1, 0], pa.int32()),
        "trajectory_id": ["a_0", "a_0", "a_1", "b_0"],
        "step_index": pa.array([0, 1, 0, 0], pa.int32()),
        "is_last_step": [False, True, True, True],
        "prompt_token_ids": pa.array([[1, 2], [1, 2, 3, 9], [4], [5]], pa.list_(pa.int32())),
        "response_ids": pa.array([[3], [5, 6], [7, 8], [9]], pa.list_(pa.int32())),
        "loss_mask": [[True], [False, True], [True, True], [True]],
        "token_source": ["engine"] * 4,
        "reward": [0.0, 1.0, 0.5, 0.25],
        "rollout_logprobs": pa.array(
            [[-1.5], [0.0, -0.5], [-0.25, -2.0], [-1.0]], pa.list_(pa.float32())
        ),
    } | columns
    if errors:
        table["error"] = pa.array(errors, pa.string())
    return pa.table(table)


def write(path, table):
    with rollout_io.RolloutWriter(path) as writer:
        writer.write(table)
    return path


FAILED = ("timeout", "timeout", None, None)
NO_REWARD = [None, None, 0.5, 0.25]


@pytest.fixture
def dataset(tmp_path):
    return write(tmp_path / "ds", table_of())


@pytest.fixture
def failed_dataset(tmp_path):
    return write(tmp_path / "ds", table_of(FAILED, reward=NO_REWARD))


@pytest.mark.parametrize("name", TOKEN_FORMATS)
def test_the_real_rollouts_are_exported_to_the_last_token(name, shop_dataset, tmp_path):
    rows = read_back(name, export(shop_dataset, name, tmp_path))
    assert len(rows) == 205
    assert rows == rollout_io.read(shop_dataset, READ).to_pylist()


def with_known_values(table):
    """Rewards on all rows of healthy trajectories, log-probabilities everywhere."""
    if "error" in table.column_names:
        failed = pc.is_valid(table["error"])
        reward = pc.if_else(failed, pa.scalar(None, pa.float64()), pc.fill_null(table["reward"], 0))
    else:
        reward = pc.fill_null(table["reward"], 0.0)
    logprobs = [[-0.5 - i for i in range(len(ids))] for ids in table["response_ids"].to_pylist()]
    table = table.drop_columns(["reward", "rollout_logprobs"]).append_column("reward", reward)
    return table.append_column("rollout_logprobs", pa.array(logprobs, pa.list_(pa.float32())))


def masked(rows, failed):
    key = "instance_id" if failed == "group" else "trajectory_id"
    bad = {row[key] for row in rows if row.get("error") is not None}
    return [row[key] in bad for row in rows]


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(60))
@given(
    rollout_tables(
        min_trajectories=1, optional=("reward", "rollout_logprobs", "rewards", "metrics", "error")
    ),
    st.sampled_from(TOKEN_FORMATS),
    st.sampled_from(["group", "trajectory"]),
)
def test_what_is_written_equals_the_table_and_the_rest_is_counted(table, name, failed):
    table = with_known_values(table)
    rows = table.to_pylist()
    mask = masked(rows, failed)
    with tempfile.TemporaryDirectory() as folder:
        dataset = write(Path(folder) / "ds", table)
        out = Path(folder) / "out"
        command = ["export", str(dataset), "--format", name, "--out", str(out), "--failed", failed]
        if all(mask) and name != "slime":
            assert run(command) == 1
            assert not out.exists()
            return
        assert run(command) == 0
        kept = [{n: row[n] for n in READ} for row, m in zip(rows, mask, strict=True) if not m]
        assert read_back(name, out) == kept
        if name == "slime":
            assert [s["remove_sample"] for s in samples_of(out)] == mask
        if name == "verl":
            scores = pq.read_table(out, columns=["rm_scores"])["rm_scores"].to_pylist()
            assert [sum(row) for row in scores] == [row["reward"] for row in kept]


def test_trl_files_have_the_fields_of_a_rollout_function(dataset, tmp_path):
    table = pq.read_table(export(dataset, "trl", tmp_path))
    assert {n: table.schema.field(n).type for n in TRL} == TRL
    assert table["env_mask"].to_pylist() == [[1], [0, 1], [1, 1], [1]]
    assert table["group_id"].to_pylist() == [0, 0, 0, 1]
    assert table["step_index"].to_pylist() == [0, 1, 0, 0]


def test_verl_files_have_the_fields_of_an_agent_loop_output(dataset, tmp_path):
    table = pq.read_table(export(dataset, "verl", tmp_path))
    assert {n: table.schema.field(n).type for n in VERL} == VERL
    assert table["uid"].to_pylist() == ["a", "a", "a", "b"]
    assert table["session_id"].to_pylist() == [0, 0, 1, 0]
    assert table["index"].to_pylist() == [0, 1, 0, 0]
    assert table["rm_scores"].to_pylist() == [[0.0], [0.0, 1.0], [0.0, 0.5], [0.25]]


def test_verl_takes_rewards_per_token_where_there_are_some(tmp_path):
    rewards = pa.array([None, [0.75, 0.25], None, [0.25]], pa.list_(pa.float64()))
    dataset = write(tmp_path / "ds", table_of(rewards=rewards))
    table = pq.read_table(export(dataset, "verl", tmp_path))
    assert table["rm_scores"].to_pylist() == [[0.0], [0.75, 0.25], [0.0, 0.5], [0.25]]
    assert "rewards" not in table.column_names


def routed(lengths):
    """One layer, top-1: the expert of each token is its position + 1."""
    rows = [[[[i + 1]] for i in range(n)] for n in lengths]
    return table_of(rollout_expert_indices=pa.array(rows, routing_type(1, 1)))


def test_verl_routing_spans_the_sequence_with_zeros_at_the_end(tmp_path):
    dataset = write(tmp_path / "ds", routed([2, 6, 1, 1]))
    table = pq.read_table(export(dataset, "verl", tmp_path))
    wanted = [[1, 2, 0], [1, 2, 3, 4, 5, 6], [1, 0, 0], [1, 0]]
    assert table["routed_experts"].to_pylist() == [[[[e]] for e in row] for row in wanted]


def test_slime_routing_is_of_all_tokens_but_the_last(tmp_path):
    dataset = write(tmp_path / "ds", routed([2, 6, 2, 1]))
    samples = samples_of(export(dataset, "slime", tmp_path))
    routes = [s["rollout_routed_experts"] for s in samples]
    assert [r.flatten().tolist() for r in routes] == [[1, 2], [1, 2, 3, 4, 5], [1, 2], [1]]
    assert {r.dtype for r in routes} == {torch.int32}
    assert {r.shape[1:] for r in routes} == {(1, 1)}


def test_slime_samples_have_the_fields_of_a_sample(tmp_path):
    columns = {
        "stop_reason": ["tool_calls", "length", "stop", "abort"],
        "policy_version": pa.array([3, 3, None, 4], pa.int32()),
        "messages": ['[{"role": "user", "content": "hi"}]', None, "[", '"text"'],
        "response_text": ["x", None, "", "y"],
    }
    samples = samples_of(export(write(tmp_path / "ds", table_of(**columns)), "slime", tmp_path))
    assert all(set(s) == SAMPLE for s in samples)
    assert [s["tokens"] for s in samples] == [[1, 2, 3], [1, 2, 3, 9, 5, 6], [4, 7, 8], [5, 9]]
    assert [s["response_length"] for s in samples] == [1, 2, 2, 1]
    assert [s["group_index"] for s in samples] == [0, 0, 0, 1]
    assert [s["index"] for s in samples] == [s["rollout_id"] for s in samples] == [0, 0, 1, 2]
    assert [s["status"] for s in samples] == ["completed", "truncated", "completed", "aborted"]
    assert [s["weight_versions"] for s in samples] == [["3"], ["3"], [], ["4"]]
    message = [{"role": "user", "content": "hi"}]
    assert [s["prompt"] for s in samples] == [message, "", "[", '"text"']
    assert samples[1]["metadata"]["trajectory_id"] == "a_0"


def test_slime_has_all_versions_of_the_sampled_tokens_and_names_the_columns_in_metadata(tmp_path):
    columns = {
        "policy_version": pa.array([3, 4, 3, 4], pa.int32()),
        "policy_versions": pa.array([[3], [0, 4], [3, 5], None], pa.list_(pa.int32())),
        "trainer_logprobs": pa.array([[-1.0], [0.0, -1.0], None, None], pa.list_(pa.float32())),
    }
    dataset = write(tmp_path / "ds", table_of(**columns))
    done = rollout_io.export(dataset, tmp_path / "out.pt", "slime")
    samples = samples_of(tmp_path / "out.pt")
    assert [s["weight_versions"] for s in samples] == [["3"], ["4"], ["3", "5"], ["4"]]
    kept = "in `metadata`, since Sample has no field for them: policy_versions, trainer_logprobs"
    assert kept in done.remarks
    assert samples[2]["metadata"]["policy_versions"] == [3, 5]


def test_slime_keeps_a_failure_as_a_removed_sample(failed_dataset, tmp_path):
    samples = samples_of(export(failed_dataset, "slime", tmp_path))
    assert [s["remove_sample"] for s in samples] == [True, True, True, False]
    assert [s["status"] for s in samples] == ["failed", "failed", "completed", "completed"]
    assert [s["reward"] for s in samples] == [0.0, 0.0, 0.5, 0.25]


def test_slime_gives_a_failure_without_calls_two_tokens(tmp_path):
    columns = {
        name: pa.array([*table_of()[name].to_pylist()[:3], []], table_of().schema.field(name).type)
        for name in READ[:-1]
    }
    table = table_of((None, None, None, "crash"), reward=[0.0, 1.0, 0.5, None], **columns)
    last = samples_of(export(write(tmp_path / "ds", table), "slime", tmp_path))[-1]
    assert (last["tokens"], last["response_length"]) == ([0, 0], 1)
    assert (last["loss_mask"], last["rollout_log_probs"]) == ([0], [0.0])


def test_slime_files_load_without_running_code_whatever_the_users_columns_hold(tmp_path):
    when = pa.array([0, 1, 2, 3], pa.timestamp("s"))
    samples = samples_of(export(write(tmp_path / "ds", table_of(when=when)), "slime", tmp_path))
    assert samples[1]["metadata"]["when"] == "1970-01-01 00:00:01"


COUNTS = [
    ("skyrl", "group", 3, {"from failed trajectories": 1}),
    ("skyrl", "trajectory", 3, {"from failed trajectories": 1}),
    *((name, "trajectory", 2, {"from failed trajectories": 2}) for name in ("trl", "verl")),
    *(
        (
            name,
            "group",
            1,
            {"from failed trajectories": 2, "from the group of a failed trajectory": 1},
        )
        for name in ("trl", "verl")
    ),
    ("slime", "group", 4, {}),
    ("hf", "group", 4, {}),
]


@pytest.mark.parametrize(("name", "failed", "num_written", "left_out"), COUNTS)
def test_every_row_read_is_written_or_counted(
    name, failed, num_written, left_out, failed_dataset, tmp_path, capsys
):
    export(failed_dataset, name, tmp_path, "--failed", failed, "--json")
    said = json.loads(capsys.readouterr().out)
    assert said["num_rows_read"] == 4
    assert said["num_rows_written"] == num_written
    assert said["left_out"] == left_out
    if name == "skyrl":
        output = json.loads((tmp_path / "out.json").read_text())
        assert len(output["response_ids"]) == num_written


@pytest.mark.parametrize("name", ["trl", "slime"])
def test_trajectories_of_several_rows_are_pointed_out(name, dataset, tmp_path, capsys):
    export(dataset, name, tmp_path)
    assert "1 of 3 trajectories have more than one row" in capsys.readouterr().err


def test_skyrl_is_the_librarys_generator_output_byte_for_byte(shop_dataset, tmp_path):
    rollout_io.write_generator_output(rollout_io.read(shop_dataset), tmp_path / "library.json")
    exported = export(shop_dataset, "skyrl", tmp_path)
    assert exported.read_bytes() == (tmp_path / "library.json").read_bytes()


def test_rollout_metrics_come_back_while_the_dataset_has_the_rollouts_of_one_file(tmp_path):
    output = rollout_io.to_generator_output(table_of()) | {"rollout_metrics": {"a/b": 1.5}}
    text = json.dumps(output, separators=(",", ":"), default=asdict) + "\n"
    (tmp_path / "in.json").write_text(text)
    ds, merged, apart, fewer = (str(tmp_path / name) for name in ("ds", "merged", "apart", "fewer"))
    assert run(["convert", str(tmp_path / "in.json"), "--out", ds]) == 0
    assert export(ds, "skyrl", tmp_path).read_bytes() == (tmp_path / "in.json").read_bytes()
    assert run(["merge", ds, "--out", merged]) == 0
    assert run(["merge", "--undo", merged, "--out", apart]) == 0
    assert run(["filter", ds, "--min-steps", "1", "--out", fewer]) == 0
    for dataset, metrics in ((merged, {"a/b": 1.5}), (apart, {"a/b": 1.5}), (fewer, None)):
        (tmp_path / "out.json").unlink()
        again = json.loads(export(dataset, "skyrl", tmp_path).read_text())
        assert again["rollout_metrics"] == metrics


def refused(dataset, name, folder, capsys, *options, code=1):
    before = sorted(folder.iterdir())
    out = str(folder / "new")
    assert run(["export", str(dataset), "--format", name, "--out", out, *options]) == code
    assert sorted(folder.iterdir()) == before
    return capsys.readouterr().err


@pytest.mark.parametrize("name", ["skyrl", *TOKEN_FORMATS])
def test_an_unknown_reward_is_refused(name, tmp_path, capsys):
    dataset = write(tmp_path / "ds", table_of(reward=NO_REWARD))
    said = refused(dataset, name, tmp_path, capsys)
    assert "[reward_known]" in said
    assert "trajectory 'a_0'" in said
    assert "Hint: convert with --rewards FILE" in said


@pytest.mark.parametrize("name", TOKEN_FORMATS)
def test_log_probabilities_on_some_rows_only_are_refused(name, tmp_path, capsys):
    some = pa.array([[-1.5], None, [-0.25, -2.0], [-1.0]], pa.list_(pa.float32()))
    dataset = write(tmp_path / "ds", table_of(rollout_logprobs=some))
    said = refused(dataset, name, tmp_path, capsys)
    assert "[all_or_none]" in said
    assert "trajectory 'a_0', step_index 1, column 'rollout_logprobs'" in said


@pytest.mark.parametrize("name", TOKEN_FORMATS)
def test_a_dataset_without_log_probabilities_is_exported_without(name, tmp_path):
    dataset = write(tmp_path / "ds", table_of().drop_columns("rollout_logprobs"))
    out = export(dataset, name, tmp_path)
    if name == "verl":
        assert "rollout_log_probs" not in pq.read_schema(out).names
    else:
        assert [row["rollout_logprobs"] for row in read_back(name, out)] == [None] * 4


@pytest.mark.parametrize("name", FORMATS)
def test_an_export_inside_its_dataset_is_refused_and_changes_nothing(name, dataset, capsys):
    before = sorted(Path(dataset).rglob("*"))
    out = Path(dataset) / f"out.{ENDING[name]}"
    assert run(["export", str(dataset), "--format", name, "--out", str(out)]) == 1
    told = capsys.readouterr().err
    assert f"the output path is inside the input dataset {dataset}. [out_is_free]" in told
    assert sorted(Path(dataset).rglob("*")) == before


def test_slime_refuses_routing_that_ends_early(tmp_path, capsys):
    dataset = write(tmp_path / "ds", routed([2, 4, 2, 1]))
    said = refused(dataset, "slime", tmp_path, capsys)
    assert "trajectory 'a_0': found routing of 4 tokens; expected 5," in said


@pytest.mark.parametrize(("name", "column"), [("trl", "group_id"), ("verl", "uid")])
def test_a_column_of_the_users_own_is_never_overwritten(name, column, tmp_path, capsys):
    dataset = write(tmp_path / "ds", table_of(**{column: ["x"] * 4}))
    assert f"dataset: the user column {column!r}" in refused(dataset, name, tmp_path, capsys)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_there_is_never_overwritten(name, dataset, tmp_path, capsys):
    (tmp_path / "new").write_text("mine")
    assert "[out_is_free]" in refused(dataset, name, tmp_path, capsys)
    assert (tmp_path / "new").read_text() == "mine"


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"parquet"}))
def test_a_folder_that_is_not_there_is_a_clean_error(name, dataset, tmp_path, capsys):
    out = tmp_path / "nowhere" / "new"
    assert run(["export", str(dataset), "--format", name, "--out", str(out)]) == 1
    assert capsys.readouterr().err.startswith(f"Error: cannot write {out}: ")
    assert not out.parent.exists()


@pytest.mark.parametrize("name", FORMATS)
def test_an_invalid_dataset_is_not_exported(name, tmp_path, capsys):
    broken = table_of(loss_mask=[[True], [True], [True, True], [True]])
    pq.write_table(broken, tmp_path / "ds.parquet")
    assert "[lengths_align]" in refused(tmp_path / "ds.parquet", name, tmp_path, capsys)


@pytest.mark.parametrize("name", ["trl", "verl"])
def test_an_export_without_rows_is_refused(name, tmp_path, capsys):
    table = table_of(("timeout",) * 4, reward=pa.nulls(4, pa.float64()))
    said = refused(write(tmp_path / "ds", table), name, tmp_path, capsys)
    assert "[some_rows]" in said
    assert "every trajectory failed" in said


@pytest.mark.parametrize("name", TOKEN_FORMATS)
def test_an_export_that_fails_halfway_leaves_nothing_behind(name, tmp_path, capsys):
    table = table_of(reward=[0.0, 1.0, 0.5, None])
    with rollout_io.RolloutWriter(tmp_path / "ds", row_group_rows=1) as writer:
        writer.write(table)
    assert len(list(rollout_io.iter_tables(tmp_path / "ds"))) > 1
    assert "trajectory 'b_0'" in refused(tmp_path / "ds", name, tmp_path, capsys)


@pytest.mark.slow
def test_exports_are_the_same_bytes_again(shop_dataset, tmp_path):
    for name in ("trl", "verl", "slime"):
        files = []
        for run_name in ("first", "second"):
            (tmp_path / name / run_name).mkdir(parents=True)
            files.append(export(shop_dataset, name, tmp_path / name / run_name).read_bytes())
        assert files[0] == files[1]


def test_a_dataset_of_many_rows_without_a_column_error_is_exported(tmp_path):
    num_rows = 10_000
    step = pa.array(range(num_rows), pa.int32())
    table = pa.table(
        {
            "instance_id": ["a"] * num_rows,
            "repetition_id": pa.array([0] * num_rows, pa.int32()),
            "trajectory_id": ["a_0"] * num_rows,
            "step_index": step,
            "is_last_step": [i == num_rows - 1 for i in range(num_rows)],
            "prompt_token_ids": pa.array([[1]] * num_rows, pa.list_(pa.int32())),
            "response_ids": pa.array([[2]] * num_rows, pa.list_(pa.int32())),
            "loss_mask": [[True]] * num_rows,
            "reward": [1.0] * num_rows,
            "rollout_logprobs": pa.array([[-0.5]] * num_rows, pa.list_(pa.float32())),
            "token_source": ["engine"] * num_rows,
        }
    )
    with rollout_io.RolloutWriter(tmp_path / "ds") as writer:
        writer.write(table)
    assert pq.read_table(export(tmp_path / "ds", "trl", tmp_path)).num_rows == num_rows
