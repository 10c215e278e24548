import builtins
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_io.formats import slime_export as slime
from rollout_io.formats.engines.files import Start
from rollout_io.formats.slime import ADAPTER
from schemas import check
from schemas.errors import RolloutError
from tests.conftest import ROOT
from tests.helpers.adapter_helpers import convert_with, planned, read_all
from tests.helpers.exact_log_helpers import check_converts
from tests.helpers.examples import examples
from tests.helpers.text_log_helpers import JUNK

PEER = ROOT / "tests" / "data" / "peers" / "slime"
TRAIN, EVAL = PEER / "rollout_7.pt", PEER / "rollout_eval_7.pt"


def sample(**fields):
    found = {"group_index": 0, "index": 0, "prompt": "hi", "tokens": [1, 2, 3, 4, 5]}
    found |= {"response_length": 3, "response": "ho", "reward": 1.0, "label": "5"}
    found |= {"loss_mask": None, "rollout_log_probs": [-0.5, -0.25, -1.0], "status": "completed"}
    return found | {"weight_versions": ["3"], "remove_sample": False, "metadata": {}} | fields


def save(path, *samples, **fields):
    torch.save({"rollout_id": 1, "samples": list(samples)} | fields, path)
    return path


def read(tmp_path, *samples):
    ((_, trajectory),), rejected = read_all(ADAPTER, save(tmp_path / "r.pt", *samples))
    assert not rejected
    return trajectory


def refusal(tmp_path, *samples):
    runs, rejected = read_all(ADAPTER, save(tmp_path / "r.pt", *samples))
    assert not runs
    return rejected[0].error


def test_real_samples_are_exactly_their_tokens(tmp_path):
    assert ADAPTER.recognizes(Start(TRAIN))
    logged = json.loads(TRAIN.with_suffix(".json").read_text(encoding="utf-8"))["samples"]
    runs, rejected = read_all(ADAPTER, TRAIN)
    assert not rejected
    for record, (run, trajectory) in zip(logged, runs, strict=True):
        (step,) = trajectory.steps
        num = record["response_length"]
        assert step.prompt_token_ids.tolist() == record["tokens"][:-num]
        assert step.response_ids.tolist() == record["tokens"][-num:]
        assert np.allclose(step.rollout_logprobs, record["rollout_log_probs"])
        mask = record["loss_mask"] or [1] * num
        assert (step.loss_mask is None) == all(mask)
        assert step.loss_mask is None or step.loss_mask.tolist() == [m == 1 for m in mask]
        assert run.instance_id == f"rollout_7/{record['group_index']}"
        assert step.policy_version == 3
        assert json.loads(step.messages) == record["prompt"]
        assert trajectory.reward == record["reward"]
        assert trajectory.user_values["label"] == record["label"]
    _, table = convert_with(ADAPTER, [TRAIN], tmp_path)
    assert check(table).is_empty()


def test_a_real_sample_of_several_turns_has_their_spans_and_an_aborted_one_has_failed():
    runs, _ = read_all(ADAPTER, TRAIN)
    turns, aborted = runs[2][1], runs[3][1]
    (step,) = turns.steps
    assert [length for _, length in step.spans] == [12, 12]
    assert all(step.rollout_logprobs[~step.loss_mask] == 0)
    assert turns.metrics["num_turns"] == 2
    assert (aborted.error, aborted.reward) == ("status: aborted", None)
    assert aborted.steps[0].stop_reason == "abort"


def test_a_real_evaluation_has_its_rewards_by_name_and_groups_of_its_own():
    ((run, trajectory),), _ = read_all(ADAPTER, EVAL)
    assert set(trajectory.metrics) == {"score", "format"}
    assert trajectory.reward is None
    assert run.instance_id == "rollout_eval_7/0"
    assert "do not name a group" in planned(ADAPTER, EVAL).about["groups"]


def test_a_reward_of_several_numbers_can_be_chosen(tmp_path):
    _, table = convert_with(ADAPTER, [EVAL], tmp_path, reward="format")
    assert table["reward"].to_pylist() == [0.5]


def test_a_reward_object_whose_reward_is_null_has_an_unknown_outcome(tmp_path):
    found = read(tmp_path, sample(reward={"reward": None, "style": 1.0}))
    assert (found.reward, found.metrics) == (None, {"style": 1.0})


def test_what_is_exported_for_slime_reads_back_as_it_was(tmp_path):
    _, table = convert_with(ADAPTER, [TRAIN], tmp_path)
    slime.write(tmp_path / "ds", tmp_path / "again.pt", failed="trajectory")
    _, again = convert_with(ADAPTER, [tmp_path / "again.pt"], tmp_path / "second")
    names = ["prompt_token_ids", "response_ids", "loss_mask", "rollout_logprobs", "stop_reason"]
    names += ["policy_version", "repetition_id", "reward"]
    alive = table.filter(table["error"].is_null())
    assert again.filter(again["error"].is_null()).select(names).equals(alive.select(names))
    assert again["error"].to_pylist()[3] == "status: failed"


def test_siblings_are_one_run_and_their_common_reward_counts_once(tmp_path):
    siblings = [sample(index=i, rollout_id=5) for i in range(3)]
    trajectory = read(tmp_path, *siblings)
    assert len(trajectory.steps) == 3
    assert trajectory.reward == 1.0
    assert {step.reward for step in trajectory.steps} == {None}
    siblings[0]["reward"] = 0.25
    assert read(tmp_path, *siblings).steps[0].reward == 0.25


def test_groups_of_several_files_are_not_one(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    paths = [save(tmp_path / name, sample()) for name in ("a/1.pt", "a/2.pt", "b/1.pt")]
    names = [run.instance_id for run in planned(ADAPTER, *paths).runs]
    assert names == [f"{paths[0]}/0", "2/0", f"{paths[2]}/0"]


def test_what_is_removed_does_not_train_and_versions_give_the_oldest(tmp_path):
    given = sample(remove_sample=True, weight_versions=["10", "9"], status="truncated")
    (step,) = read(tmp_path, given).steps
    assert (step.trains, step.policy_version, step.stop_reason) == (False, 9, "length")
    trajectory = read(tmp_path, sample(weight_versions=["default"]))
    assert trajectory.steps[0].policy_version is None
    assert trajectory.user_values["weight_versions"] == "default"


def test_tensors_and_arrays_are_plain_data(tmp_path):
    routes = np.arange(16, dtype=np.int32).reshape(4, 2, 2)
    kinds = [
        sample(rollout_routed_experts=routes, tokens=np.arange(1, 6)),
        sample(rollout_routed_experts=torch.tensor(routes), loss_mask=torch.ones(3)),
        sample(rollout_routed_experts=routes.tolist(), reward=np.float32(1.0)),
    ]
    for kind in kinds:
        trajectory = read(tmp_path, kind)
        (step,) = trajectory.steps
        assert step.rollout_expert_indices.tolist() == routes.tolist()
        assert step.response_ids.tolist() == [3, 4, 5]
        assert trajectory.reward == 1.0


class Attack:
    def __reduce__(self):
        return builtins.exec, ("raise SystemExit",)


class Unknown:
    pass


@pytest.mark.parametrize("value", [Attack(), Unknown(), Path("x"), np.array([{}], dtype=object)])
def test_a_file_that_would_run_code_is_not_loaded(tmp_path, value):
    path = save(tmp_path / "r.pt", sample(metadata={"x": value}))
    assert ADAPTER.recognizes(Start(path))
    (rejected,) = planned(ADAPTER, path).rejected
    assert rejected.error.rule == "torch_file"


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"response_length": 9}, "lengths_align"),
        ({"response_length": -1}, "record_type"),
        ({"response_length": 0}, "nonempty_response"),
        ({"response_length": 5, "rollout_log_probs": None}, "nonempty_prompt"),
        ({"loss_mask": [1, 0]}, "lengths_align"),
        ({"rollout_log_probs": [-0.5]}, "lengths_align"),
        ({"rollout_log_probs": [-0.5, -0.5, float("nan")]}, "logprobs_finite"),
        ({"rollout_log_probs": [-0.5, -0.5, 0.5]}, "logprobs_nonpositive"),
        ({"tokens": [1, 2, 3, 4, -1]}, "token_range"),
        ({"tokens": [1, 2, 3, 4, 2**40]}, "token_range"),
        ({"tokens": [1, 2, 3, 4, 10**30]}, "record_type"),
        ({"tokens": [[1], [2]]}, "record_type"),
        ({"tokens": "12345"}, "record_type"),
        ({"rollout_routed_experts": [[0]]}, "routing_shape"),
        ({"rollout_routed_experts": np.zeros((9, 1, 1), np.int32)}, "routing_shape"),
        ({"tokens": [1, 2, 3, True, 5]}, "record_type"),
        ({"tokens": [True, True, True, True, True]}, "record_type"),
        ({"rollout_log_probs": [-0.5, False, -1.0]}, "record_type"),
        ({"loss_mask": [1, 0, -1]}, "record_type"),
        ({"loss_mask": [1, 0, 0.5]}, "record_type"),
        ({"reward": {"reward": "0.5", "style": 1.0}}, "record_type"),
        ({"reward": "high"}, "record_type"),
        ({"reward": 10**400}, "record_type"),
        ({"group_index": "a"}, "record_type"),
    ],
)
def test_a_sample_of_no_use_is_refused_by_name_and_place(tmp_path, fields, rule):
    error = refusal(tmp_path, sample(**fields))
    assert error.rule == rule
    assert "r.pt, samples[0]" in error.where


def test_a_failed_sample_is_kept_with_what_it_has(tmp_path):
    trajectory = read(tmp_path, sample(status="failed", reward=None))
    assert (trajectory.error, len(trajectory.steps)) == ("status: failed", 1)
    empty = sample(status="aborted", reward=None, tokens=[], response_length=0, response="")
    empty["rollout_log_probs"] = None
    trajectory = read(tmp_path, empty)
    assert (trajectory.error, list(trajectory.steps)) == ("status: aborted", [])


def test_files_that_are_no_dumps_are_named(tmp_path):
    cut = tmp_path / "cut.pt"
    cut.write_bytes(save(tmp_path / "r.pt", sample()).read_bytes()[:500])
    pointer = tmp_path / "lfs.pt"
    pointer.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n")
    other = tmp_path / "weights.pt"
    torch.save({"w": torch.zeros(2)}, other)
    rules = [r.error.rule for r in planned(ADAPTER, cut, pointer, other).rejected]
    assert rules == ["torch_file", "lfs_pointer", "no_calls"]
    assert not any(map(ADAPTER.recognizes, map(Start, (cut, pointer, other, tmp_path))))


def test_a_dump_is_recognized_and_refused_with_a_hint_where_torch_is_missing(tmp_path, monkeypatch):
    path = save(tmp_path / "r.pt", sample())
    monkeypatch.setitem(sys.modules, "torch", None)
    assert ADAPTER.recognizes(Start(path))
    (rejected,) = planned(ADAPTER, path).rejected
    assert rejected.error.rule == "extra_installed"
    with pytest.raises(RolloutError, match="extra_installed"):
        convert_with(ADAPTER, [path], tmp_path)


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(st.sampled_from(sorted(sample())), JUNK | st.floats() | st.just({1: float("inf")}))
def test_any_value_of_a_field_gives_rows_or_a_named_error(name, value):
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder) / "r.pt", sample(**{name: value}), sample(index=1))
        check_converts(ADAPTER, path, 2)


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0), st.integers(0, 255), st.booleans())
def test_damaged_bytes_give_rows_or_a_named_error(at, byte, is_cut):
    content = bytearray(TRAIN.read_bytes())
    at %= len(content)
    content = content[:at] if is_cut else content[:at] + bytes([byte]) + content[at + 1 :]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "r.pt"
        path.write_bytes(content)
        check_converts(ADAPTER, path)


def test_a_damaged_sample_takes_its_siblings_with_it_and_no_others(tmp_path):
    siblings = [sample(rollout_id=1), sample(rollout_id=1, response_length="2")]
    others = [sample(rollout_id=2, index=5), "no sample", sample(response_length=None)]
    runs, rejected = read_all(ADAPTER, save(tmp_path / "a.pt", *siblings, *others))
    assert [run.labels["rollout_id"] for run, _ in runs] == ["2"]
    rules = [item.error.rule for item in rejected]
    assert rules == ["record_type"] * 3 + ["incomplete_trajectory"]
