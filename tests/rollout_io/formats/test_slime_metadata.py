"""Columns that the export to slime keeps in metadata come back as they were."""

import pyarrow as pa
import pytest

import rollout_io
from rollout_io.formats import slime_export as slime
from rollout_io.formats.slime import ADAPTER
from schemas.columns import METRICS_TYPE, metrics_dict
from tests.helpers.adapter_helpers import convert_with, read_all
from tests.rollout_io.formats.test_export import table_of, write
from tests.rollout_io.formats.test_slime import sample, save

TOKEN_SETS = pa.list_(pa.list_(pa.int32()))
LOGPROB_SETS = pa.list_(pa.list_(pa.float32()))


def test_the_columns_that_an_export_keeps_in_metadata_read_back_as_they_were(tmp_path):
    lists = {
        "policy_versions": pa.array([[3], [0, 4], [3, 5], [4]], pa.list_(pa.int32())),
        "trainer_logprobs": pa.array([[-1.1], [0.0, -1.0], None, None], pa.list_(pa.float32())),
        "teacher_token_ids": pa.array([[[7, 8]], [[], [1]], None, None], TOKEN_SETS),
        "teacher_logprobs": pa.array([[[-0.1, -3.0]], [[], [-0.5]], None, None], LOGPROB_SETS),
    }
    columns = {
        "temperature": pa.array([0.5, 0.5, 1.0, 1.0], pa.float32()),
        "top_k": pa.array([None, 20, None, -1], pa.int32()),
        "sampling_extra": ['{"min_p": 0.1}', None, None, None],
        "agent": ["main", "checker", "main", None],
        "stop_reason": ["tool_calls", "length", None, "stop"],
        "token_source": ["engine", "retokenized", "engine", "engine"],
        "env": ["shop", None, "shop", "shop"],
        "policy_version": pa.array([3, 4, 3, 4], pa.int32()),
        "metrics": pa.array([None, [("turns", 2.0)], [("turns", 1.0)], None], METRICS_TYPE),
    }
    dataset = write(tmp_path / "first", table_of(**lists, **columns))
    slime.write(dataset, tmp_path / "again.pt")
    _, again = convert_with(ADAPTER, [tmp_path / "again.pt"], tmp_path)
    table = rollout_io.read(dataset)
    for name in [n for n in (*lists, *columns) if n not in {"stop_reason", "metrics"}]:
        assert again[name].to_pylist() == table[name].to_pylist(), name
    assert again["stop_reason"].to_pylist() == ["tool_calls", "length", "stop", "stop"]
    metrics = [metrics_dict(row) or {} for row in again["metrics"].to_pylist()]
    assert [m.get("turns") for m in metrics] == [None, 2.0, 1.0, None]
    assert {"step_index", "repetition_id", "temperature"}.isdisjoint(
        {name for m in metrics for name in m}
    )


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"trainer_logprobs": [-0.5]}, "lengths_align"),
        ({"trainer_logprobs": [0.5, 0.5, 0.5]}, "logprobs_nonpositive"),
        ({"teacher_token_ids": [[-1], [1]]}, "record_type"),
        ({"policy_versions": [2**31, 1]}, "record_type"),
        ({"temperature": "hot"}, "record_type"),
    ],
)
def test_a_wrong_column_in_the_metadata_of_an_export_is_refused(wrong, rule, tmp_path):
    own = {"trajectory_id": "a_0", "token_source": "engine"}
    path = save(tmp_path / "a.pt", sample(metadata=own | wrong))
    _, rejected = read_all(ADAPTER, path)
    assert [r.error.rule for r in rejected] == [rule]
