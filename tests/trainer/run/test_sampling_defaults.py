"""Rows that do not record how they were sampled are not taken as sampled at temperature 1."""

import json
import tempfile
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.sampling_defaults import SamplingDefaults, sampling_defaults
from rollout_io.cli.main import run
from schemas.errors import RolloutError
from tests.helpers.configs import train_config
from tests.helpers.trainer_helpers import group_rows, save_tiny_model, write_dataset
from trainer.training import train

USED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}


@pytest.fixture
def model(tmp_path):
    path = save_tiny_model(tmp_path / "model")
    write_defaults(path, {"do_sample": True, **USED})
    return path


def write_defaults(model, settings):
    Path(model, "generation_config.json").write_text(json.dumps(settings))


def rows(**columns):
    return group_rows(2, (1.0, 0.0), rollout_logprobs=[-4.0] * 4, **columns)


def trained(folder, model, columns, mode="raw", **settings):
    """The metrics of the update, or the id of the error."""
    dataset = write_dataset(folder / "ds", rows(**columns), logprobs_mode=mode)
    config = train_config(dataset=dataset, model=model, out=str(folder / "run"), **settings)
    try:
        return dict(train(config).metrics)
    except RolloutError as error:
        assert not (folder / "run").exists()
        return str(error.rule)


@pytest.mark.parametrize(
    ("columns", "settings"),
    [
        ({}, {}),
        ({}, {"tis_ratio_type": None}),
        ({"temperature": 0.6, "top_p": 0.95}, {}),
        ({"temperature": 0.6, "top_k": 20}, {}),
    ],
)
def test_settings_that_the_model_sets_and_rows_leave_out_are_refused(
    columns, settings, model, tmp_path
):
    assert trained(tmp_path, model, columns, **settings) == "sampling_defaults"


def test_the_refusal_names_the_row_the_settings_and_the_remedy(model, tmp_path, capfd):
    dataset = write_dataset(tmp_path / "ds", rows(), logprobs_mode="raw")
    assert run(["train", dataset, "--model", model, "--out", str(tmp_path / "run")]) == 1
    said = capfd.readouterr().err
    assert "row 0 (the first of 8): the row does not record temperature or top_p or top_k" in said
    assert "generation_config.json (temperature 0.6, top_p 0.95, top_k 20)" in said
    assert "rollout_logprobs are not from the sampled distribution" in said
    assert "--set data.sampling_defaults=model" in said


@pytest.mark.parametrize("mode", ["raw", "processed", "allowed"])
def test_the_models_settings_train_like_recorded_ones(mode, model, tmp_path):
    for name in ("absent", "present"):
        (tmp_path / name).mkdir()
    allowed = {"allow_mismatched_logprobs": mode == "allowed"}
    kind = "raw" if mode == "raw" else "processed"
    absent = trained(tmp_path / "absent", model, {}, kind, sampling_defaults="model", **allowed)
    present = trained(tmp_path / "present", model, USED, kind, **allowed)
    if mode != "allowed":
        assert absent == present == "rollout_logprobs"
    else:
        assert isinstance(absent, dict)
        assert isinstance(present, dict)
        assert absent["grad_norm"] == present["grad_norm"]
        assert absent["policy_entropy"] == present["policy_entropy"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("columns", "settings", "defaults"),
    [
        ({}, {"sampling_defaults": "neutral"}, USED),
        (NEUTRAL, {}, USED),
        (NEUTRAL, {}, {"repetition_penalty": 1.1}),
        ({"temperature": 1.0}, {}, {"temperature": 0.6, "top_k": 0}),
        ({}, {"policy_loss_type": "cross_entropy"}, USED),
        ({"token_source": "retokenized"}, {"tis_ratio_type": None}, USED),
        ({}, {}, NEUTRAL),
    ],
)
def test_rows_that_record_or_do_not_need_the_settings_train(
    columns, settings, defaults, model, tmp_path
):
    write_defaults(model, defaults)
    assert isinstance(trained(tmp_path, model, columns, **settings), dict)


@pytest.mark.parametrize("defaults", [{"repetition_penalty": 1.1}, {"min_p": 0.1}])
def test_penalties_of_the_model_are_settings_too(defaults, model, tmp_path):
    write_defaults(model, defaults)
    assert trained(tmp_path, model, {}) == "sampling_defaults"


def test_rows_without_settings_are_noted_with_their_count(model, tmp_path, capfd):
    Path(model, "generation_config.json").unlink(missing_ok=True)
    dataset = write_dataset(tmp_path / "ds", rows(temperature=1.0), logprobs_mode="raw")
    assert run(["train", dataset, "--model", model, "--out", str(tmp_path / "run")]) == 0
    said = "note: 8 rows of an engine without a recorded top_p or top_k: trained as sampled"
    assert said in capfd.readouterr().err


VALUES = st.one_of(
    st.none(), st.booleans(), st.text(max_size=3), st.floats(), st.integers(), st.lists(st.none())
)


@given(st.dictionaries(st.sampled_from([*USED, "min_p", "repetition_penalty", "x"]), VALUES))
def test_any_generation_config_is_read_without_failing(settings):
    with tempfile.TemporaryDirectory() as folder:
        write_defaults(folder, settings)
        found = sampling_defaults(folder)
    assert isinstance(found, SamplingDefaults)
    assert found.temperature >= 0
    assert 0 < found.top_p <= 1
    pl.LazyFrame({"temperature": [None, 0.5]}).pipe(found.fill).collect()
