"""Training keys as options of the verbs, and the configuration as TOML."""

import dataclasses
import json
import re
import tomllib

import pytest

from rollout_io.cli.main import run
from trainer.config.train_config import Sections, load_config, resolved, to_toml

OPTIONS = ["--lr", "2e-5", "--max-updates", "3", "--algorithm", "rloo"]


def shown(capsys, *arguments):
    assert run(["train", *arguments, "--show-config"]) == 0
    return capsys.readouterr().out


def test_show_config_prints_toml_that_gives_the_same_configuration(shop_dataset, tmp_path, capsys):
    own = ["--set", "run.trackers=['tensorboard']"]
    arguments = [str(shop_dataset), "--model", "m", "-o", str(tmp_path / "run"), *own, *OPTIONS]
    text = shown(capsys, *arguments)
    (tmp_path / "again.toml").write_text(text)
    again = load_config(tmp_path / "again.toml", [])
    assert (again.optimizer.learning_rate, again.batch.max_updates, again.advantage.estimator) == (
        2e-5,
        3,
        "rloo",
    )
    assert (again.data.outcome, again.batch.merge_rule, again.batch.max_row_tokens) == (
        "last",
        "lineage",
        None,
    )
    assert again == resolved(again)
    assert not (tmp_path / "run").exists()


def test_show_config_needs_no_dataset_and_explains_every_key_the_common_first(capsys):
    text = shown(capsys, "--algorithm", "rloo")
    values = tomllib.loads(text)
    keys = {(section, key) for section, table in values.items() for key in table}
    kinds = {field.name: field.default_factory for field in dataclasses.fields(Sections)}
    assert keys == {
        (s, field.name) for s, kind in kinds.items() for field in dataclasses.fields(kind)
    }
    lines = [line for line in text.splitlines() if " = " in line and not line.startswith("[")]
    assert len(lines) == len(keys)
    assert all(re.search(r"  # \S.*\.$", line) for line in lines)
    assert list(values)[:4] == ["data", "model", "run", "optimizer"]
    assert [next(iter(table)) for table in values.values()][:4] == [
        "dataset",
        "path",
        "out",
        "learning_rate",
    ]
    assert values["advantage"]["estimator"] == "rloo"


def test_show_config_quotes_every_text_as_toml_reads_it(shop_dataset, capsys):
    name = "m\U0001f600\x7f\u2028"
    arguments = [str(shop_dataset), "--model", name, "--out", "o"]
    assert tomllib.loads(shown(capsys, *arguments))["model"]["path"] == name
    assert json.loads(shown(capsys, *arguments, "--json"))["model"]["path"] == name


def test_options_override_the_file_and_set_overrides_options(shop_dataset, tmp_path, capsys):
    (tmp_path / "f.toml").write_text("[optimizer]\nlearning_rate = 1.0\n[batch]\nmax_updates = 9\n")
    arguments = [str(shop_dataset), "--model", "m", "--out", "o", "--config", tmp_path / "f.toml"]
    arguments = [*map(str, arguments), "--lr", "0.5"]
    found = tomllib.loads(shown(capsys, *arguments))
    assert (found["optimizer"]["learning_rate"], found["batch"]["max_updates"]) == (0.5, 9)
    found = tomllib.loads(shown(capsys, *arguments, "--set", "optimizer.learning_rate=0.25"))
    assert found["optimizer"]["learning_rate"] == 0.25


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--algorithm", "grop"], "did you mean `grpo`?"),
        (["--lr", "-1"], "learning_rate"),
        (["--max-updates", "0"], "max_updates"),
    ],
)
def test_a_wrong_value_of_an_option_names_the_key(shop_dataset, capsys, arguments, text):
    command = ["train", str(shop_dataset), "--model", "m", "--out", "o", "--show-config"]
    assert run([*command, *arguments]) == 1
    printed = capsys.readouterr()
    assert text in printed.err
    assert "[config_value]" in printed.err
    assert printed.out == ""


def test_options_of_rl_set_keys_of_its_table(tmp_path, monkeypatch):
    import trainer.rl as rl

    seen = []

    class Stop(Exception):
        pass

    def stop(settings, **_):
        seen.append(settings.training)
        raise Stop

    monkeypatch.setattr(rl, "run", stop)
    (tmp_path / "t.jsonl").write_text("")
    config = tmp_path / "rl.toml"
    config.write_text(
        f'[model]\npath = "m"\n[loop]\ntasks = "{tmp_path}/t.jsonl"\nnum_iterations = 1\n'
        '[generate]\nenvironment = "gsm8k"\ngroup_size = 4\n'
    )
    command = ["rl", str(config), "--out", str(tmp_path / "run"), "--lr", "2e-5"]
    assert run([*command, "--algorithm", "rloo"]) == 2
    assert (seen[0].optimizer.learning_rate, seen[0].advantage.estimator) == (2e-5, "rloo")


def test_toml_has_every_kind_of_value():
    values = {
        "text": 'a "b"\n\u00e9\u0000',
        "table": {"a b": [1, {"c": None}]},
        "on": True,
        "x": 1e-6,
    }
    found = tomllib.loads(to_toml(values))
    assert found == values | {"table": {"a b": [1, {"c": "none"}]}}
