"""The audit of a few rows in each iteration."""

import pytest

from schemas.errors import RolloutError
from tests.helpers.generation_helpers import SpyEngine
from tests.helpers.rl_helpers import config_of, lines_of, save_model
from tests.helpers.view_helpers import Asked
from trainer import rl

LONG = {"max_response_tokens": 24}
FAST = {"learning_rate": 0.05}
"""Versions differ by much more than rounding."""


class StaleEngine(SpyEngine):
    """Keeps its first weights, and labels its answers with the new version."""

    async def load_weights(self, path, *, policy_version):  # noqa: ARG002
        self.policy_version = policy_version


@pytest.fixture(scope="module")
def model(tmp_path_factory, tokenizer):
    return save_model(tmp_path_factory.mktemp("model"), tokenizer)


@pytest.fixture(autouse=True)
def _one_loading(monkeypatch, tokenizer):
    for module in ("trainer.rl.loop", "trainer.engine.embedded", "trainer.run.model_checks"):
        monkeypatch.setattr(f"{module}.load_tokenizer", lambda *_, **__: tokenizer)


def stale(sampling):
    return StaleEngine.load(sampling.model, max_batch_size=4)


@pytest.mark.slow
def test_weights_that_were_not_loaded_are_reported(tmp_path, model, capsys):
    config = config_of(tmp_path, model, generate=LONG, train=FAST, num_iterations=2)
    rl.run(config, open_engine=stale)
    first = [line for line in lines_of(config.run.out) if "num_audited_rows" in line]
    assert [line["num_audited_rows"] for line in first] == [4, 4]
    assert [line["num_mismatched_rows"] for line in first] == [0, 4]
    said = capsys.readouterr().err
    assert "warning: 4 of 4 audited rows were not sampled as labelled; trajectory 't" in said
    assert "sampled by version 0, labelled 1" in said
    assert "new weights were not loaded into the engine" in said
    ask = Asked(config.run.out)
    assert ask("/api/sources")["warnings"] == []
    for dataset, expected in (("d0", {None, "none"}), ("d1", {None, "version"})):
        found = ask(f"/api/datasets/{dataset}/trajectories")
        assert set(found["faults"]) == expected
        assert found["faults"].count() == 4
    name = found.filter(faults="version")["trajectory_id"][0]
    (span,) = ask("/api/datasets/d1/verdicts", trajectory_id=name)["spans"]
    assert span["reason"] == "sampled by version 0, labelled 1"


@pytest.mark.slow
def test_a_mismatch_stops_the_run(tmp_path, model):
    config = config_of(tmp_path, model, generate=LONG, train=FAST, on_mismatch="stop")
    with pytest.raises(RolloutError, match="weights_mismatch") as error:
        rl.run(config, open_engine=stale)
    assert "sampled by version 0, labelled 1" in str(error.value)
    assert "--set loop.on_mismatch=warn" in error.value.hint
    assert {line["iteration"] for line in lines_of(config.run.out)} == {0}


@pytest.mark.slow
@pytest.mark.parametrize("audit_rows", [0, 3])
def test_rows_sampled_as_labelled_pass(tmp_path, model, capsys, audit_rows):
    config = config_of(tmp_path, model, generate=LONG, train=FAST, audit_rows=audit_rows)
    rl.run(config)
    first = [line for line in lines_of(config.run.out) if "staleness_mean" in line]
    found = [(line.get("num_audited_rows"), line.get("num_mismatched_rows")) for line in first]
    assert found == [(3, 0) if audit_rows else (None, None)] * 3
    assert "not sampled as labelled" not in capsys.readouterr().err
