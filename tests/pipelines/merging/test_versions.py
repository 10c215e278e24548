"""Versions of the weights by token: kept by merging, and the ranges that one version sampled."""

from itertools import groupby

import pytest
from hypothesis import given

import pipelines
from pipelines.merging.merge import split_versions
from schemas.strategies import rollout_tables

COLUMNS = ("policy_version", "policy_versions", "rollout_logprobs", "sampling_support")
LISTS = ("response_ids", "loss_mask", "policy_versions", "rollout_logprobs", "sampling_support")


@given(rollout_tables(optional=COLUMNS, user_column=False))
def test_a_row_is_split_where_its_version_changes_and_nowhere_else(table):
    found = split_versions(table).to_pylist()
    expected = []
    for row in table.to_pylist():
        versions, at = row["policy_versions"], 0
        runs = [(None, len(row["response_ids"]))]
        if versions and len(set(versions)) > 1:
            runs = [(v, len(list(same))) for v, same in groupby(versions)]
        for version, length in runs:
            part = {n: v and v[at : at + length] for n, v in row.items() if n in LISTS}
            part["prompt_token_ids"] = row["prompt_token_ids"] + row["response_ids"][:at]
            part["policy_version"] = row["policy_version"] if version is None else version
            expected.append(row | part)
            at += length
    names = ("trajectory_id", "prompt_token_ids", "policy_version", *LISTS)
    assert [{n: row[n] for n in names} for row in found] == [
        {n: row[n] for n in names} for row in expected
    ]


@pytest.mark.slow
@given(rollout_tables(optional=COLUMNS, user_column=False))
def test_merged_rows_keep_the_version_of_every_sampled_token(table):
    merged = pipelines.merge(table).collect()
    assert pipelines.unmerge(merged).collect().to_arrow().column("policy_versions").to_pylist() == (
        table.column("policy_versions").to_pylist()
    )
    for row in merged.to_dicts():
        for segment in (row.get("segments") or []) if row["policy_versions"] else []:
            span = slice(segment["start"], segment["start"] + segment["length"])
            row["policy_versions"][span] = [0] * segment["length"]
        if row.get("segments") and row["policy_versions"]:
            assert not any(row["policy_versions"])  # 0 at observations
