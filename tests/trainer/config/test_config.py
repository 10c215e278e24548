import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import trainer
from schemas.errors import RolloutError
from tests.helpers.trainer_helpers import group_rows, write_dataset
from trainer.cli.train import how_to_resume
from trainer.config.loss_config import LossConfig
from trainer.config.train_config import TrainConfig, load_config, save_config

PATHS = ["dataset=ds", "model=m", "out=o"]


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('dataset = "a"\nmodel = "m"\nout = "o"\nseed = 3\nlearning_rate = 1e-5\n')
    config = load_config(file, ["seed=4", "dataset=runs=1"])
    assert (config.seed, config.dataset, config.learning_rate) == (4, "runs=1", 1e-5)


def test_values_are_typed_by_their_field() -> None:
    texts = [
        "tis_ratio_type=none",
        "betas=[0.5, 0.9]",
        "gradient_checkpointing=true",
        "max_updates=2",
    ]
    config = load_config(None, [*PATHS, *texts, "out=2024", 'trackers=["tensorboard"]'])
    assert (config.tis_ratio_type, config.betas, config.gradient_checkpointing) == (
        None,
        (0.5, 0.9),
        True,
    )
    assert (config.max_updates, config.out, config.trackers) == (2, "2024", ("tensorboard",))


def test_options_win_over_the_file_and_set_over_both(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('dataset = "a"\nmodel = "m"\nout = "o"\n')
    config = load_config(file, ["out=by_set"], dataset='runs=1,"x"', out="by_option")
    assert (config.dataset, config.model, config.out) == ('runs=1,"x"', "m", "by_set")


def test_unknown_key_fails_with_the_nearest_name() -> None:
    with pytest.raises(RolloutError, match="learning_rat`") as error:
        load_config(None, [*PATHS, "learning_rat=1"])
    assert error.value.hint == "did you mean `learning_rate`?"


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("seed=many", "seed=many"),
        ("seed=none", "seed"),
        ("groups_per_batch=1.5", "groups_per_batch"),
        ("sequence_layout=trees", "sequence_layout"),
        ("token_tis_ratio_clip_high=0", "token_tis_ratio_clip_high"),
        ("learning_rate=nan", "learning_rate"),
        ("betas=[0.9, 1.0]", "betas"),
        ("eps_clip_low=1.5", "eps_clip_low"),
        ("max_updates=0", "max_updates"),
        ("seed", "key=value"),
    ],
)
def test_bad_value_is_refused_and_named(override: str, named: str) -> None:
    with pytest.raises(RolloutError) as error:
        load_config(None, [*PATHS, override])
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("outcome=mean", 'found "mean"; expected one of last, sum'),
        ("learning_rate=fast", 'found "fast"; expected a number'),
        ("seed=1.5", "found 1.5; expected a whole number"),
        ("normalize_by_std=1", "found 1; expected true or false"),
        ("tis_ratio_type=high", 'found "high"; expected one of auto, token, sequence or none'),
        ("betas=[0.9]", r"found \[0.9\]; expected a list \[a number, a number\]"),
    ],
)
def test_value_of_another_type_says_what_is_expected_in_words(override: str, message: str) -> None:
    with pytest.raises(RolloutError, match=rf"--set .*: {message}.*\[config_value\]"):
        load_config(None, [*PATHS, override])


def test_text_for_a_list_shows_how_to_write_one() -> None:
    with pytest.raises(RolloutError) as error:
        load_config(None, [*PATHS, "trackers=tensorboard"])
    shown = """--set 'trackers=["tensorboard"]'"""
    assert shown in (error.value.hint or "")
    [override] = shlex.split(shown)[1:]
    assert load_config(None, [*PATHS, override]).trackers == ("tensorboard",)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('learning_rate = "1e-5"', 'key learning_rate: found "1e-5"; expected a number'),
        ('normalize_by_std = "false"', 'found "false"; expected true or false'),
        ('max_updates = "2"', 'found "2"; expected a whole number or none'),
        ("dataset = 3", "found 3; expected text"),
    ],
)
def test_quoted_values_in_a_file_stay_text(tmp_path: Path, line: str, expected: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(line)
    with pytest.raises(RolloutError, match=expected):
        load_config(file, PATHS)


def test_none_in_a_file_is_quoted(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('tis_ratio_type = "none"\ndataset = "none"')
    config = load_config(file, PATHS[1:])
    assert (config.tis_ratio_type, config.dataset) == (None, "none")


def test_a_seed_beyond_numpys_is_refused() -> None:
    assert load_config(None, [*PATHS, f"seed={2**32 - 1}"]).seed == 2**32 - 1
    with pytest.raises(
        RolloutError, match=r"seed: found 4294967296; expected a number below 2\^32"
    ):
        load_config(None, [*PATHS, f"seed={2**32}"])


def test_conflict_names_both_fields() -> None:
    with pytest.raises(
        RolloutError, match="groups_per_batch and groups_per_mini_batch: found 8 and 3"
    ):
        load_config(None, [*PATHS, "groups_per_mini_batch=3"])


@pytest.mark.parametrize("text", ["seed = ", "\xff"])
def test_unreadable_file_is_a_clean_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(RolloutError, match="config_file"):
        load_config(file, PATHS)


def test_missing_file_is_a_clean_error(tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="input_file"):
        load_config(tmp_path / "none.toml", PATHS)


def test_missing_model_is_named() -> None:
    with pytest.raises(RolloutError, match="Missing key: model"):
        load_config(None, ["dataset=ds", "out=o"])


def test_saved_config_loads_again(tmp_path: Path) -> None:
    config = load_config(None, [*PATHS, "tis_ratio_type=none", "betas=[0.1,0.2]"])
    save_config(config, tmp_path / "config.json")
    values = json.loads((tmp_path / "config.json").read_text())
    assert TrainConfig(**values | {"betas": (0.1, 0.2), "trackers": ()}) == config


@pytest.mark.parametrize("kind", [TrainConfig, LossConfig])
def test_every_field_is_documented(kind: type[LossConfig]) -> None:
    source = Path(sys.modules[kind.__module__].__file__ or "").read_text()
    for name in kind.__slots__:
        after = source.split(f"\n    {name}: ", 1)[1].split("\n", 2)[1]
        assert after.strip().startswith('"""'), name


def test_importing_the_package_and_its_verb_imports_no_torch() -> None:
    code = "import sys, trainer, trainer.cli.train; sys.exit('torch' in sys.modules or 'polars' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_a_missing_dataset_or_model_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
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


def test_a_stopped_run_says_how_to_go_on(tmp_path: Path) -> None:
    again = "no checkpoint yet: run the same command again"
    assert how_to_resume(str(tmp_path / "run")) == again
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").touch()
    assert how_to_resume(str(tmp_path / "run")) == f"{again}, with --resume"
    (tmp_path / "run" / "checkpoints" / "global_step_1").mkdir(parents=True)
    assert "--resume to continue from the checkpoints in" in how_to_resume(str(tmp_path / "run"))


def test_missing_torch_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import trainer\n"
        "try: trainer.train(trainer.TrainConfig(dataset='d', model='m', out='o'))\n"
        "except trainer.RolloutError as error: print(error.hint)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == 'pip install "rollout-io[train]"'


def test_public_names() -> None:
    own_functions = {"AdvantageEstimator", "CriticAdvantages", "LossReduction", "PolicyLoss"}
    verbs = {"TrainConfig", "dry_run", "load_config", "train"}
    assert set(trainer.__all__) == verbs | own_functions | {"TokenLoss"}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("groups_per_batch=0", "a whole number >= 1"),
        ("seed=-1", "a whole number >= 0"),
        ("weight_decay=inf", "a finite number >= 0"),
        ("learning_rate=0", "a finite number > 0"),
        ("gamma=1.5", r"a number in \[0, 1\]"),
        ("clip_ratio_c=1", "a finite number > 1"),
        ("clip_cov_ratio=nan", r"a number in \[0, 1\]"),
    ],
)
def test_numbers_are_held_to_the_bounds_of_their_annotation(override: str, expected: str) -> None:
    with pytest.raises(RolloutError, match=f"expected {expected}"):
        load_config(None, [*PATHS, override])
