"""Responses whose weights changed on the way: each range is audited under its recorded version."""

import numpy as np
import polars as pl
import torch

import rollout_io
from rollout_io.dataset.trajectory_facts import with_stored_digest
from tests.helpers.audit_helpers import Request, prompt_of, row, sample, save_versions, tiny_models
from tests.helpers.trainer_helpers import write_dataset
from trainer.forensics.audit.audit import run_audit
from trainer.forensics.audit.rows import read_audit_rows
from trainer.forensics.audit.weights import Weights, find_candidates

SWAP = 25


def test_each_range_is_compared_with_the_version_that_is_recorded_for_it(tmp_path):
    models = tiny_models(3, 0.1, initializer_range=0.3)
    rng = np.random.default_rng(0)
    asked = [
        Request(prompt=prompt_of(rng), versions=lambda p: 1 if p < SWAP else 2) for _ in range(8)
    ]
    rows = [
        row(n, 0, request.prompt, one, version=1, policy_versions=[1] * SWAP + [2] * 15)
        for n, (request, one) in enumerate(zip(asked, sample(models, asked), strict=True))
    ]
    for wrong in rows[6:]:  # the second version is not what is recorded
        wrong["policy_versions"] = [1] * SWAP + [0] * 15
    dataset = write_dataset(tmp_path / "ds", rows, logprobs_mode="processed")
    weights = save_versions(tmp_path / "weights", models)
    found = Weights(find_candidates([weights]), device=torch.device("cpu"))
    audited = read_audit_rows(rollout_io.scan(dataset), rollout_io.read_metadata(dataset))
    verdicts = run_audit(audited, found, dataset=dataset).verdicts
    assert len(verdicts) == 16
    assert verdicts.filter(pl.col("step_index") != 0).is_empty()
    first, second = (verdicts.filter(pl.col("span") == span) for span in (0, 1))
    assert set(first["kind"]) == {"as_labelled"}
    assert set(first["start"]) == {0}
    assert set(second["start"]) == {SWAP}
    assert set(verdicts["num_response_tokens"]) == {40}
    stored = with_stored_digest(rollout_io.scan(dataset)).collect()
    digests = [frame.select("trajectory_id", "row_digest").rows() for frame in (stored, verdicts)]
    assert dict(digests[0]) == dict(digests[1])
    second = second.sort("trajectory_id")
    assert second["labelled_version"].to_list() == [2] * 6 + [0] * 2
    assert second["kind"].to_list() == ["as_labelled"] * 6 + ["version"] * 2
    assert second["best_version"].to_list() == [2] * 8
