"""Folders of ATIF trajectories outside a job, with exports and incomplete runs beside them."""

import json
import shutil
from pathlib import Path

import pytest

import rollout_io
from rollout_io.cli.main import run
from rollout_io.conversion.driver import convert
from rollout_io.conversion.plan import Keywords
from schemas.errors import RolloutError
from tests.helpers.harbor_helpers import GOLDEN, agent_step, atif, refers, write

TRACES = [{"conversations": [{"role": "user", "content": "hi"}], "episode": "0", "trial_name": "t"}]


def trajectory(path, **fields):
    return write(path, atif(agent_step(1, [1, 2], [3]), **fields))


def rejected(out):
    lines = (out.parent / f"{out.name}.rejected.jsonl").read_text().splitlines()
    return {Path(line["source"]).name: line["rule"] for line in map(json.loads, lines)}


def test_an_agent_folder_without_a_result_is_read_as_a_trajectory(tmp_path):
    trajectory(tmp_path / "one" / "agent" / "trajectory.json")
    (tmp_path / "one" / "agent" / "terminus.log").write_text("log")
    trajectory(tmp_path / "many" / "a" / "agent" / "trajectory.json")
    trajectory(tmp_path / "many" / "b" / "agent" / "trajectory.json")
    for name, num in (("one", 1), ("many", 2)):
        for format_name in ("auto", "harbor"):
            out = tmp_path / f"{name}-{format_name}"
            done = convert(tmp_path / name, out, format=format_name)
            assert (done.summary.num_trajectories, done.summary.num_rejected) == (num, 0)
    row = rollout_io.read(tmp_path / "one-auto").to_pylist()[0]
    assert (row["prompt_token_ids"], row["response_ids"]) == ([1, 2], [3])
    assert row["reward"] is None


def test_an_agent_folder_with_a_damaged_trajectory_is_an_error(tmp_path):
    (tmp_path / "trial" / "agent").mkdir(parents=True)
    (tmp_path / "trial" / "agent" / "trajectory.json").write_text("{")
    with pytest.raises(RolloutError, match=r"trajectory\.json"):
        convert(tmp_path / "trial", tmp_path / "ds", format="harbor")


def test_exports_beside_logs_are_skipped_and_counted(tmp_path):
    folder = tmp_path / "logs"
    trajectory(folder / "a.trajectory.json")
    export = write(folder / "a.traces.json", TRACES)
    for format_name in ("auto", "harbor"):
        out = tmp_path / format_name
        done = convert(folder, out, format=format_name)
        assert (done.summary.num_records, done.summary.num_rejected) == (1, 0)
        assert done.left == [str(export)]
    with pytest.raises(RolloutError, match=r"traces export.*\[harbor_export\]") as caught:
        convert(folder, tmp_path / "strict", strict=True)
    assert "or pass --on-error skip to skip exports" in (caught.value.hint or "")


@pytest.mark.parametrize("named", [True, False])
def test_an_export_that_is_named_or_alone_is_rejected(tmp_path, *, named):
    folder = tmp_path / "logs"
    export = write(folder / "a.traces.json", TRACES)
    given = [str(folder)]
    if named:
        trajectory(folder / "a.trajectory.json")
        given = [str(folder / "a.trajectory.json"), str(export)]
    with pytest.raises(RolloutError, match=r"\[harbor_export\]"):
        convert(given, tmp_path / "ds")


def test_the_files_of_a_rejected_run_are_rejected_with_it(tmp_path):
    folder = tmp_path / "logs"
    lost = refers(2, {"session_id": "s", "trajectory_path": "lost.json"})
    head = atif(agent_step(1, [1], [2]), lost, continued_trajectory_ref="run.cont-1.json")
    write(folder / "run.json", head)
    write(
        folder / "run.cont-1.json",
        atif(agent_step(1, [1], [4]), continued_trajectory_ref="run.cont-2.json"),
    )
    trajectory(folder / "run.cont-2.json", notes="of the run")
    trajectory(folder / "whole.json", continued_trajectory_ref="whole.cont-1.json")
    trajectory(folder / "whole.cont-1.json", notes="of the other")
    out = tmp_path / "ds"
    done = convert(folder, out, on_error="skip").summary
    assert (done.num_records, done.num_written, done.num_trajectories) == (4, 1, 1)
    incomplete = "incomplete_trajectory"
    assert rejected(out) == {
        "run.json": "dangling_reference",
        "run.cont-1.json": incomplete,
        "run.cont-2.json": incomplete,
    }


def test_a_real_continuation_of_an_incomplete_run_is_not_a_trajectory(
    harness_logs, smollm2_dir, tmp_path
):
    name = GOLDEN.replace(".", "-linear-history.")
    for suffix in (".json", ".cont-1.json"):
        shutil.copy(harness_logs / "harbor/golden/terminus_2" / f"{name}{suffix}", tmp_path)
    choices = Keywords(tokenizer=str(smollm2_dir), on_error="skip")
    with pytest.raises(RolloutError, match="no record can be used"):
        convert(tmp_path, tmp_path / "ds", **choices)


def test_convert_says_that_ids_without_text_were_not_compared(smollm2_dir, tmp_path, capfd):
    steps = [agent_step(1, [1, 2], [3])]
    write(tmp_path / "logs" / "silent.json", atif(*[step | {"message": ""} for step in steps]))
    args = ["convert", str(tmp_path / "logs"), "--out"]
    with_it = [str(tmp_path / "a"), "--tokenizer", str(smollm2_dir)]
    assert run([*args, *with_it]) == 0
    said = capfd.readouterr().err
    assert "ids compared with the text in the log: 0 trajectories; 1 could not be compared" in said
    assert f"`rollouts inspect {tmp_path / 'a'}` shows whether their ids decode" in said
    assert run([*args, *with_it]) == 0  # the dataset is up to date: its counts are read
    assert "1 could not be compared" in capfd.readouterr().err
    assert run([*args, str(tmp_path / "b")]) == 0
    said = capfd.readouterr().err
    assert "tokenizer unknown: the dataset does not record it" in said
    assert "could not be compared" not in said


def test_trajectories_whose_ids_were_compared_are_counted_apart(smollm2_dir, tmp_path):
    from rollout_io.retokenize import load_tokenizer

    tokenizer = load_tokenizer(str(smollm2_dir))
    text = "the quick brown foxes jumped over those lazy dogs while singing"
    ids = tokenizer.encode([text], ["text"])[0]
    spoken = agent_step(1, [1, 2], [int(token) for token in ids], message=text)
    write(tmp_path / "logs" / "spoken.json", atif(spoken))
    write(tmp_path / "logs" / "silent.json", atif(agent_step(1, [1, 2], [3], message="")))
    chosen = Keywords(tokenizer=str(smollm2_dir))
    found = convert(tmp_path / "logs", tmp_path / "ds", **chosen).summary
    assert (found.num_exact, found.num_compared) == (2, 1)
    text = found.tokenizer_text("ds", str(smollm2_dir)) or ""
    assert "1 trajectory; 1 could not be compared" in text
    assert found.tokenizer_text("ds", None)
