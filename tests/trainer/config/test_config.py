import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import trainer
from schemas.errors import RolloutError
from tests.helpers.configs import SECTIONS, from_saved, train_config
from tests.helpers.trainer_helpers import group_rows, write_dataset
from trainer.cli import resume_command
from trainer.cli.train import how_to_resume
from trainer.config.train_config import TrainConfig, load_config, save_config
from trainer.run.messages import say_learning_rate

PATHS = ["data.dataset=ds", "model.path=m", "run.out=o"]


def test_overrides_win_over_the_file(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text(
        '[data]\ndataset = "a"\n[model]\npath = "m"\n[run]\nout = "o"\nseed = 3\n'
        "[optimizer]\nlearning_rate = 1e-5\n"
    )
    config = load_config(file, ["run.seed=4", "data.dataset=runs=1"])
    assert (config.run.seed, config.data.dataset, config.optimizer.learning_rate) == (
        4,
        "runs=1",
        1e-5,
    )


def test_values_are_typed_by_their_field():
    texts = [
        "loss.tis_ratio_type=none",
        "optimizer.betas=[0.5, 0.9]",
        "model.gradient_checkpointing=true",
        "batch.max_updates=2",
    ]
    config = load_config(None, [*PATHS, *texts, "run.out=2024", 'run.trackers=["tensorboard"]'])
    assert (
        config.loss.tis_ratio_type,
        config.optimizer.betas,
        config.model.gradient_checkpointing,
    ) == (None, (0.5, 0.9), True)
    assert (config.batch.max_updates, config.run.out, config.run.trackers) == (
        2,
        "2024",
        ("tensorboard",),
    )


def test_options_win_over_the_file_and_set_over_both(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('[data]\ndataset = "a"\n[model]\npath = "m"\n[run]\nout = "o"\n')
    config = load_config(
        file, ["run.out=by_set"], {"data.dataset": 'runs=1,"x"', "run.out": "by_option"}
    )
    assert (config.data.dataset, config.model.path, config.run.out) == ('runs=1,"x"', "m", "by_set")


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("eps_clip_high", "loss.eps_clip_high"),
        ("learning_rat", "optimizer.learning_rate"),
        ("loss.learning_rate", "optimizer.learning_rate"),
        ("advantage_estimator", "advantage.estimator"),
        ("loss_reduction", "loss.reduction"),
        ("lr", "optimizer.learning_rate"),
        ("optimizer.lr", "optimizer.learning_rate"),
        ("batch_size", "batch.groups_per_batch"),
        ("epochs", "batch.num_epochs"),
    ],
)
def test_a_key_outside_its_section_names_the_section(tmp_path, key, place):
    file = tmp_path / "c.toml"
    table, dot, name = key.rpartition(".")
    file.write_text(f"[{table}]\n{name} = 1\n" if dot else f"{key} = 1\n")
    for arguments in ((None, [*PATHS, f"{key}=1"]), (file, PATHS)):
        with pytest.raises(RolloutError, match=r"unknown key .*\[config_key\]") as error:
            load_config(*arguments)
        section = place.partition(".")[0]
        assert error.value.hint == f"did you mean `{place}`? It belongs in [{section}]"


def test_all_unknown_keys_are_in_one_error_and_only_similar_names_are_suggested(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("[optimizer]\nlr = 1\nzzz = 1\n")
    with pytest.raises(RolloutError) as error:
        load_config(file, [*PATHS, "epochs=3", "loss.eps_clip_hig=1"])
    parts = str(error.value).removesuffix(". [config_key]").split("; ")
    assert parts == [
        "--set epochs=3: unknown key `epochs` (did you mean `batch.num_epochs`?)",
        f"{file}, key optimizer.lr: unknown key `lr` (did you mean `optimizer.learning_rate`?)",
        f"{file}, key optimizer.zzz: unknown key `zzz`",
        "--set loss.eps_clip_hig=1: unknown key `eps_clip_hig` (did you mean `loss.eps_clip_high`?)",
    ]
    assert error.value.hint is not None
    assert error.value.hint.startswith("use one of the keys optimizer.algorithm, ")


@pytest.mark.parametrize(
    ("settings", "rate"),
    [
        ({}, 1e-6),
        ({"lora_rank": 8}, 1e-5),
        ({"policy_loss_type": "cross_entropy"}, 2e-5),
        ({"policy_loss_type": "cross_entropy", "lora_rank": 8}, 2e-4),
        ({"lora_rank": 8, "learning_rate": 3e-6}, 3e-6),
    ],
)
def test_the_usual_learning_rate_follows_from_the_method(settings, rate, caplog):
    caplog.set_level("INFO")
    config = train_config(**settings)
    assert config.learning_rate == rate
    say_learning_rate(config)
    (record,) = caplog.records
    assert (record.levelname, record.getMessage().split()[2]) == ("INFO", f"{rate:g}")


def test_a_learning_rate_that_destroys_the_model_warns(caplog):
    say_learning_rate(train_config(learning_rate=1.0))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("learning rate 1 will probably destroy the model; usual")
    assert "1e-06" in record.getMessage()


@pytest.mark.parametrize(("key", "place"), [("model", "model.path"), ("loss", "loss.KEY")])
def test_a_section_that_is_set_like_a_key_names_a_key(tmp_path, key, place):
    file = tmp_path / "c.toml"
    file.write_text(f'{key} = "m"\n')
    for arguments in ((None, [*PATHS, f"{key}=m"]), (file, PATHS)):
        with pytest.raises(RolloutError) as error:
            load_config(*arguments)
        assert (error.value.hint or "").startswith(f"[{key}] is a section: set `{place}")


def test_an_option_does_not_hide_a_key_of_the_file_outside_its_section(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('model = "m"\n')
    paths = {"data.dataset": "ds", "model.path": "m", "run.out": "o"}
    with pytest.raises(RolloutError, match='key model: found "m"; expected a table'):
        load_config(file, [], paths)


REFUSED = {
    "data.outcome=mean": 'found "mean"; expected one of last, sum',
    "batch.sequence_layout=trees": "sequence_layout",
    "optimizer.learning_rate=fast": 'found "fast"; expected a number',
    "run.seed=1.5": "found 1.5; expected a whole number",
    "run.seed=none": "run.seed=none: found",
    "run.seed=-1": "expected a whole number >= 0",
    f"run.seed={2**32}": "seed: found 4294967296; expected a number below 2^32",
    "batch.groups_per_batch=0": "expected a whole number >= 1",
    "batch.max_updates=0": "max_updates: found 0",
    "advantage.normalize_by_std=1": "found 1; expected true or false",
    "advantage.estimator=ppo": "expected one of grpo, rloo, maxrl",
    "advantage.gamma=1.5": "expected a number in [0, 1]",
    "advantage.gae_lambda=nan": "gae_lambda: found nan; expected a number in",
    "loss.tis_ratio_type=high": 'found "high"; expected one of auto, token, sequence or none',
    "loss.clip_ratio_c=1": "expected a finite number > 1",
    "loss.value_clip=0": "value_clip: found 0.0; expected a finite number > 0",
    "loss.eps_clip_low=1.5": "eps_clip_low",
    "optimizer.betas=[0.9]": "found [0.9]; expected a list [a number, a number]",
    "optimizer.betas=[0.9, 1.0]": "betas",
    "optimizer.learning_rate=nan": "learning_rate",
    "optimizer.weight_decay=inf": "expected a finite number >= 0",
    "optimizer.critic_learning_rate=0": "critic_learning_rate: found 0.0",
    "optimizer.learning_rat=1": "unknown key `learning_rat`",
    "model.critic_model=c": "model.critic_model and advantage.estimator: found c and grpo",
    "batch.groups_per_mini_batch=3": "batch.groups_per_batch and batch.groups_per_mini_batch",
    "run.seed": "an override must have the form key=value",
    "model.path=": "Missing key: model.path",
}


@pytest.mark.parametrize("override", REFUSED)
def test_a_value_that_a_key_cannot_have_is_refused_with_what_is_expected(override):
    with pytest.raises(RolloutError, match=re.escape(REFUSED[override])):
        load_config(None, [*PATHS, override])


def test_text_for_a_list_shows_how_to_write_one():
    with pytest.raises(RolloutError) as error:
        load_config(None, [*PATHS, "run.trackers=tensorboard"])
    shown = """--set 'run.trackers=["tensorboard"]'"""
    assert shown in (error.value.hint or "")
    [override] = shlex.split(shown)[1:]
    assert load_config(None, [*PATHS, override]).run.trackers == ("tensorboard",)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            '[optimizer]\nlearning_rate = "1e-5"',
            'key optimizer.learning_rate: found "1e-5"; expected a number',
        ),
        ('[advantage]\nnormalize_by_std = "false"', 'found "false"; expected true or false'),
        ('[batch]\nmax_updates = "2"', 'found "2"; expected a whole number or none'),
        ("[data]\ndataset = 3", "found 3; expected text"),
    ],
)
def test_quoted_values_in_a_file_stay_text(tmp_path, line, expected):
    file = tmp_path / "c.toml"
    file.write_text(line)
    with pytest.raises(RolloutError, match=expected):
        load_config(file, PATHS)


def test_none_in_a_file_is_quoted(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('[loss]\ntis_ratio_type = "none"\n[data]\ndataset = "none"')
    config = load_config(file, PATHS[1:])
    assert (config.loss.tis_ratio_type, config.data.dataset) == (None, "none")


@pytest.mark.parametrize("text", ["seed = ", "\xff"])
def test_unreadable_file_is_a_clean_error(tmp_path, text):
    file = tmp_path / "c.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(RolloutError, match="config_file"):
        load_config(file, PATHS)


def test_saved_config_loads_again(tmp_path):
    config = load_config(None, [*PATHS, "loss.tis_ratio_type=none", "optimizer.betas=[0.1,0.2]"])
    save_config(config, tmp_path / "config.json")
    values = json.loads((tmp_path / "config.json").read_text())
    assert from_saved(TrainConfig, values) == config


@pytest.mark.parametrize("kind", [TrainConfig, *SECTIONS.values()])
def test_every_field_is_documented(kind):
    source = Path(sys.modules[kind.__module__].__file__ or "").read_text()
    source = source.split(f"class {kind.__name__}", 1)[1]
    for name in kind.__slots__:
        after = source.split(f"\n    {name}: ", 1)[1].split("\n", 2)[1]
        assert after.strip().startswith('"""'), name


def test_importing_the_package_and_its_verb_imports_no_torch():
    code = "import sys, trainer, trainer.cli.train; sys.exit('torch' in sys.modules or 'polars' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_a_missing_dataset_or_model_is_refused_before_torch_is_imported(tmp_path):
    dataset = write_dataset(tmp_path / "ds", group_rows(1, (1.0, 0.0)))
    code = (
        "import sys; from rollout_io.cli.main import run\n"
        "print(run(sys.argv[1:]), 'torch' in sys.modules)"
    )
    out = ["--model", str(tmp_path / "model"), "--out", str(tmp_path / "run")]
    for path, rule in ((str(tmp_path / "none"), "dataset_exists"), (dataset, "model_directory")):
        command = [sys.executable, "-c", code, "train", path, *out]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.stdout == "1 False\n"
        assert f"[{rule}]" in done.stderr


def test_a_stopped_run_says_how_to_go_on(tmp_path):
    out = str(tmp_path / "run")
    again = f"continue with `{resume_command('train', out, 2)}`"
    assert again == f"continue with `rollouts train --resume {out} --num-processes 2`"
    assert resume_command("rl", "my run", 1) == "rollouts rl --resume 'my run'"
    assert how_to_resume(out, again).endswith("run the same command again")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").touch()
    assert how_to_resume(out, again) == f"no checkpoint yet; {again}"
    (tmp_path / "run" / "checkpoints" / "global_step_1").mkdir(parents=True)
    assert how_to_resume(out, again) == f"saved in {tmp_path}/run/checkpoints; {again}"


def test_missing_torch_names_the_extra():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import trainer\n"
        "try: trainer.train(trainer.load_config(None, ['data.dataset=d', 'model.path=m', 'run.out=o']))\n"
        "except trainer.RolloutError as error: print(error.hint)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == 'pip install "rollout-io[train]"'


def test_public_names():
    own_functions = {"CriticAdvantages"}
    verbs = {"TrainConfig", "dry_run", "load_config", "train"}
    verbs |= {f"{name.capitalize()}Config" for name in SECTIONS if name != "loop"}
    assert set(trainer.__all__) == verbs | own_functions | {"TokenLoss"}
