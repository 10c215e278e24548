"""Versions of the weights by token, as SGLang and miles report them."""

import json

import pytest
import torch

import rollout_io
from rollout_io import convert
from rollout_io.formats.slime import ADAPTER
from schemas.errors import RolloutError
from tests.helpers.adapter_helpers import read_all


def spans(*parts):
    return [{"version": v, "start": start, "end": end} for v, start, end in parts]


def call(session, weight_versions, **fields):
    content = [{"token": "a", "logprob": -0.5}] * 3
    choice = {"index": 0, "token_ids": [4, 5, 6], "finish_reason": "stop"}
    choice |= {"logprobs": {"content": content}, "message": {"content": "aaa"}}
    choice |= {"meta_info": {"weight_versions": weight_versions, "id": "x"}}
    response = {"prompt_token_ids": [1, 2], "choices": [choice]}
    request = {"messages": [{"role": "user", "content": "hi"}]}
    line = {"session": session, "request": request, "response": response, "reward": 1.0}
    return json.dumps(line | fields)


def converted(tmp_path, *lines):
    log = tmp_path / "log.calls.jsonl"
    log.write_text("\n".join(lines) + "\n")
    convert([log], tmp_path / "ds", format="calls")
    rows = rollout_io.read(tmp_path / "ds").to_pylist()
    return rows


def test_spans_of_sglang_become_a_version_per_token(tmp_path):
    rows = converted(
        tmp_path,
        call("a/0", spans(("7", 0, 2), ("8", 2, 3))),
        call("a/1", None, policy_version=6),
        call("a/2", spans(("8", 0, 3)), policy_version=6),
    )
    assert [row["policy_version"] for row in rows] == [7, 6, 8]
    assert [row["policy_versions"] for row in rows] == [[7, 7, 8], [6, 6, 6], [8, 8, 8]]


def test_without_spans_there_is_no_column_of_versions(tmp_path):
    (row,) = converted(tmp_path, call("a/0", None, policy_version=6))
    assert "policy_versions" not in row
    assert row["policy_version"] == 6


def test_calls_of_other_engines_have_no_meta_info(tmp_path):
    line = json.loads(call("a/0", None))
    del line["response"]["choices"][0]["meta_info"]
    (row,) = converted(tmp_path, json.dumps(line))
    assert "policy_versions" not in row


def test_versions_that_are_not_numbers_are_left_out(tmp_path):
    (row,) = converted(tmp_path, call("a/0", spans(("default", 0, 3))))
    assert "policy_versions" not in row


@pytest.mark.parametrize(
    "bad", [[("7", 0, 2)], [("7", 0, 4)], [("7", 1, 3)], [("7", 0, 2), ("8", 1, 3)], [("7", 0, 0)]]
)
def test_spans_that_do_not_cover_the_response_are_refused(tmp_path, bad):
    with pytest.raises(RolloutError, match="weight_versions"):
        converted(tmp_path, call("a/0", spans(*bad)))


def test_spans_of_miles_count_from_the_prompt_and_skip_what_was_not_sampled(tmp_path):
    calls = [{"spans": spans(("3", 2, 4))}, {"spans": spans(("4", 5, 6))}]
    sample = {"group_index": 0, "index": 0, "prompt": "hi", "tokens": [1, 2, 3, 4, 5, 6]}
    sample |= {"response_length": 4, "response": "ho", "reward": 1.0, "status": "completed"}
    sample |= {"loss_mask": [1, 1, 0, 1], "rollout_log_probs": [-0.5] * 4, "metadata": {}}
    sample |= {"weight_versions": calls, "remove_sample": False, "label": "5"}
    torch.save({"rollout_id": 1, "samples": [sample]}, tmp_path / "r.pt")
    ((_, trajectory),), rejected = read_all(ADAPTER, tmp_path / "r.pt")
    assert not rejected
    (step,) = trajectory.steps
    assert step.policy_versions.tolist() == [3, 3, 0, 4]
    assert step.policy_version == 3
