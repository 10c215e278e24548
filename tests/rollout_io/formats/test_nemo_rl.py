import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from rollout_io.formats.engines.files import Start
from rollout_io.formats.nemo_gym import NEMO_RL
from tests.helpers.adapter_helpers import convert_with, planned, read_all
from tests.helpers.examples import examples
from tests.helpers.line_log_helpers import check_records
from tests.helpers.text_log_helpers import mutated, save


def message(role, ids, logprobs=None):
    made = {"role": role, "content": "", "token_ids": ids}
    return made if logprobs is None else made | {"generation_logprobs": logprobs}


def run(*log, **fields):
    return {"message_log": list(log), "input_message_log": list(log[:1])} | fields


TWO_CALLS = run(
    message("user", [1, 2]),
    message("assistant", [3], [-0.5]),
    message("user", [4, 5]),
    message("assistant", [6, 7], [-0.25, 0.0]),
    full_result={"reward": 1.0, "response": {}},
)


def document(*runs):
    return {"input": [{"id": i} for i, _ in enumerate(runs)], "expected_output": list(runs)}


def test_each_answer_is_a_call_whose_prompt_is_all_before_it(tmp_path):
    ((found_run, found),), rejected = read_all(NEMO_RL, save(tmp_path / "a", document(TWO_CALLS)))
    assert rejected == []
    assert [s.prompt_token_ids.tolist() for s in found.steps] == [[1, 2], [1, 2, 3, 4, 5]]
    assert [s.response_ids.tolist() for s in found.steps] == [[3], [6, 7]]
    assert found.steps[1].rollout_logprobs.tolist() == [-0.25, 0.0]
    assert found.steps[1].rollout_logprobs.dtype == np.float32
    assert (found.reward, found.metrics) == (1.0, {"reward": 1.0})
    assert found_run.instance_id == f"{tmp_path / 'a'}, expected_output[0]"


def test_runs_of_a_list_are_read_and_written_with_their_exact_ids(tmp_path):
    plain = run(message("user", [1]), message("assistant", [2]))
    done, table = convert_with(NEMO_RL, [save(tmp_path / "a", [TWO_CALLS, plain])], tmp_path)
    assert (done.summary.num_records, done.summary.num_written) == (2, 2)
    assert done.about["groups"].startswith("inferred: each run")
    assert table["response_ids"].to_pylist() == [[3], [6, 7], [2]]
    assert table["token_source"].to_pylist() == ["engine"] * 3
    assert table["rollout_logprobs"].to_pylist()[2] is None
    assert table["reward"].to_pylist() == [0.0, 1.0, None]


@pytest.mark.parametrize(
    ("log", "rule", "got"),
    [
        ([message("user", [1]), message("assistant", [])], "no_token_ids", "an empty list"),
        ([message("user", None), message("assistant", [2])], "no_token_ids", "no token ids"),
        ([{"role": "user"}, message("assistant", [2])], "no_token_ids", "no token ids"),
        ([message("user", [1])], "no_calls", "no model response"),
        ([message("assistant", [2])], "nonempty_prompt", "the prompt has no tokens"),
        ([message("user", [1]), message("assistant", [2], [])], "lengths_align", "0 logprobs"),
        ([message("user", [1]), message("assistant", [2], [0.5])], "logprobs_nonpositive", "0.5"),
        ([message("user", [2**31]), message("assistant", [2])], "token_range", "2147483648"),
        ([message("user", ["1"]), message("assistant", [2])], "record_type", "str"),
    ],
)
def test_every_reason_for_missing_tokens_has_its_name_and_place(log, rule, got, tmp_path):
    path = save(tmp_path / "a", document(TWO_CALLS, run(*log)))
    found, ((place, error, _),) = read_all(NEMO_RL, path)
    assert len(found) == 1
    assert place.where == f"{path}, expected_output[1]"
    assert error.rule == rule
    assert got in error.got
    assert error.where.startswith(place.where)


def test_the_real_pair_of_renderings_is_recognized_and_has_no_run(harness_logs):
    path = harness_logs / "nemo_gym" / "nemo_rl.maybe_correct_merged_tokens_test_data.json"
    assert NEMO_RL.recognizes(Start(path))
    plan = planned(NEMO_RL, path)
    assert plan.runs == []
    ((_, error, _),) = plan.rejected
    assert (error.rule, error.got) == (
        "no_calls",
        "the document has two renderings of a prompt, but no response",
    )


def test_the_real_message_logs_are_refused_for_the_ids_that_were_emptied(harness_logs):
    path = harness_logs / "nemo_gym" / "nemo_rl.test_nemo_gym_sanity.json"
    assert NEMO_RL.recognizes(Start(path))
    found, rejected = read_all(NEMO_RL, path)
    assert found == []
    got = "the message of role 'assistant' has an empty list of token ids"
    assert [(r.error.rule, r.error.got) for r in rejected] == [("no_token_ids", got)] * 2
    assert rejected[1].error.where == f"{path}, expected_output[1], message_log[1]"


@given(mutated(json.dumps(document(TWO_CALLS, TWO_CALLS)).encode()))
@settings(deadline=None, max_examples=examples(150))
def test_no_damage_loses_a_run_or_ends_in_a_traceback(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.json"
        path.write_bytes(content)
        check_records(NEMO_RL, path, planned(NEMO_RL, path).num_records)
