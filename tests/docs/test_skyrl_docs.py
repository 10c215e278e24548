"""The table from SkyRL's names to ours names what there is."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import tempfile

import pytest

from pipelines.generation.config import GenerateConfig
from rollout_io.formats.skyrl_fields import COLUMN_FIELDS, OPTIONAL, REQUIRED, USER_FIELDS
from schemas.columns import COLUMN_BY_NAME
from tests.conftest import ROOT
from tests.helpers.configs import SECTIONS
from trainer.rl.config import EvaluateConfig, load_rl_config

DOCS = ROOT / "docs"
PAGE = (DOCS / "skyrl.md").read_text(encoding="utf-8")
TABLES = SECTIONS | {"generate": GenerateConfig, "evaluate": EvaluateConfig}


@pytest.mark.parametrize(("page", "least"), [("skyrl.md", 40), ("search.md", 30)])
def test_every_key_that_stands_for_one_of_skyrl_is_a_key_here(page: str, least: int) -> None:
    named = re.findall(r"`\[(\w+)\] (\w+)`", (DOCS / page).read_text(encoding="utf-8"))
    assert len(named) > least
    for table, key in named:
        assert key in {field.name for field in dataclasses.fields(TABLES[table])}, (table, key)


def test_every_field_of_an_output_has_its_column() -> None:
    section = PAGE.partition("## Fields")[2].partition("## Metrics")[0]
    rows = dict(re.findall(r"^\| `(\w+)`(?: \(SkyRL 0\.4\))? \| (.+) \|$", section, re.MULTILINE))
    assert rows.keys() == {*REQUIRED, *OPTIONAL, "rollout_metrics"}
    for field, columns in rows.items():
        if field not in {*USER_FIELDS, "rollout_metrics"}:
            assert set(re.findall(r"`(\w+)`", columns)) <= COLUMN_BY_NAME.keys()


def test_the_toml_of_skyrls_defaults_is_a_configuration() -> None:
    section = PAGE.partition("## Defaults that differ")[2].partition("\n## ")[0]
    [text] = re.findall(r"```toml\n(.+?)```", section, re.DOTALL)
    own = {"model.path": "m", "loop.tasks": "t.jsonl", "run.out": "run", "loop.num_iterations": 1}
    path = pathlib.Path(tempfile.mkdtemp()) / "skyrl.toml"
    path.write_text(text, encoding="utf-8")
    overrides = [f"{key}={value}" for key, value in own.items()]
    config = load_rl_config(path, [*overrides, "generate.environment=gsm8k"])
    training = config.training
    assert (training.loss.kl_loss_coef, training.loss.tis_ratio_type) == (0.001, None)
    assert (training.batch.groups_per_batch, training.batch.groups_per_mini_batch) == (1024, 256)
    assert (training.batch.sequence_layout, training.data.outcome) == ("step", "last")
    assert config.generation.group_size == 5
    assert (config.generation.max_turns, training.run.seed) == (1, 42)
    assert training.model.gradient_checkpointing


@pytest.mark.parametrize(("name", "staleness"), [("harbor_sync", 0), ("harbor_async", 4)])
def test_the_examples_for_harbor_are_configurations(name: str, staleness: int) -> None:
    path = ROOT / "examples" / f"{name}.toml"
    config = load_rl_config(path, ["run.out=run", "loop.tasks=t", "model.path=m"])
    assert config.loop.max_staleness == staleness
    assert str(config.generation.harness).split()[1] == "examples/harbor_trial.py"


def test_the_columns_that_an_output_may_have_are_named() -> None:
    text = PAGE.partition("**How rows were sampled.**")[2].partition("\n\n")[0]
    assert set(COLUMN_FIELDS) <= set(re.findall(r"`(\w+)`", text))
