"""Runs with functions of the user's: those of the docs, next to the built-in ones, and refusals."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import trainer
from rollout_io.cli.main import run as main
from schemas.errors import RolloutError
from tests.conftest import ROOT
from tests.helpers import own_functions
from tests.helpers.configs import dotted, train_config
from tests.helpers.losses_helpers import some_trajectories
from tests.helpers.trainer_helpers import metrics_of, save_tiny_model, write_dataset
from trainer.rl import load_rl_config

MINE = "tests.helpers.own_functions"
COMMON = {
    "groups_per_mini_batch": 1,
    "epochs_per_batch": 2,
    "learning_rate": 1e-3,
    "tokens_per_micro_batch": 30,
    "partial_groups": "train",
}
TIMES = {"seconds", "tokens_per_s"}
CLIP = {"low": 0.2, "high": 0.3}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    rows = some_trajectories(rollout_logprobs=[-4.0, -3.0, -5.0, -4.5])
    for number, row in enumerate(rows):
        row["reward"] = row["reward"] if row["is_last_step"] else 0.1 * (number % 3)
    dataset = write_dataset(folder / "ds", rows, logprobs_mode="processed")
    return {"dataset": dataset, "model": save_tiny_model(folder / "model")}


def run(paths, out, **settings):
    """The weights at the end."""
    result = trainer.train(train_config(**paths, **COMMON | settings, out=str(out)))
    return weights(Path(result.checkpoint))


def weights(checkpoint):
    files = sorted(checkpoint.rglob("*.safetensors"))
    return {f"{file.parent.name} {k}": v for file in files for k, v in load_file(file).items()}


def lines_of(out, *, without=frozenset()):
    lines = metrics_of(out)
    return [{k: v for k, v in line.items() if k not in TIMES | without} for line in lines]


def check_same(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_the_functions_of_the_docs_are_the_built_in_ones_bit_for_bit(
    paths, tmp_path, monkeypatch, capfd
):
    page = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    command = re.search(r"\n    (rollouts train [^`]*?mine:.*?)\n\n", page, re.DOTALL)
    assert command
    given = command[1].replace("\\\n", "").split()[2:]
    given = [{"DS": paths["dataset"], "DIR": paths["model"], "RUN": "run"}.get(g, g) for g in given]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere", *__import__("sys").path])
    Path("mine.py").write_text(example)
    common = [f"--set={dotted(key)}={value}" for key, value in COMMON.items()]
    assert main(["train", *given, *common]) == 0
    notes = capfd.readouterr().err
    line = example[: example.index("def my_loss")].count("\n") + 1
    place = f"{tmp_path}/mine.py:{line}"
    keys = "eps_clip_low = 0.2, eps_clip_high = 0.2"
    assert f"note: loss.policy_loss_type: mine:my_loss ({place}): {keys}\n" in notes
    found = weights(Path("run/checkpoints") / "global_step_4")
    built_in = {"estimator": "rloo", "reduction": "sequence_mean"}
    check_same(found, run(paths, tmp_path / "built_in", **built_in))
    with pytest.raises(AssertionError):
        check_same(found, run(paths, tmp_path / "other"))


PAIRS = {
    "correction and KL": (
        {"policy_loss_type": f"{MINE}:regular", "loss_own": CLIP},
        {"policy_loss_type": "regular", "eps_clip_high": 0.3},
    ),
    "sampler": ({"policy_loss_type": f"{MINE}:rollout_is"}, {"policy_loss_type": "rollout_is"}),
    "sampler, corrected by name": (
        {"policy_loss_type": f"{MINE}:regular", "loss_own": CLIP, "tis_ratio_type": "sequence"},
        {"policy_loss_type": "regular", "eps_clip_high": 0.3, "tis_ratio_type": "sequence"},
    ),
    "supervised": (
        {"policy_loss_type": f"{MINE}:supervised"},
        {"policy_loss_type": "cross_entropy"},
    ),
    "reduction": ({"reduction": f"{MINE}:trajectory_mean"}, {"reduction": "trajectory_mean"}),
    "KL in the reward": (
        {"estimator": f"{MINE}:rloo", "kl_loss_coef": 0.0, "kl_reward_coef": 0.1},
        {"estimator": "rloo", "kl_loss_coef": 0.0, "kl_reward_coef": 0.1},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_a_function_trains_as_the_built_in_one_that_it_repeats(name, paths, tmp_path):
    own, built_in = PAIRS[name]
    others = {"kl_loss_coef": 0.1, "entropy_loss_coef": 0.01}
    found = run(paths, tmp_path / "own", **others | own)
    check_same(found, run(paths, tmp_path / "built_in", **others | built_in))
    own_names = frozenset({"clip_ratio", "policy_loss/ratio"})
    lines = lines_of(tmp_path / "own", without=own_names)
    assert lines == lines_of(tmp_path / "built_in", without=own_names)
    if name == "sampler":
        lines = lines_of(tmp_path / "own", without=frozenset({"policy_loss/ratio"}))
        assert lines == lines_of(tmp_path / "built_in")
        assert lines_of(tmp_path / "own")[0]["policy_loss/ratio"] > 0


@pytest.mark.slow
def test_an_estimator_with_a_critic_is_gae(paths, tmp_path):
    settings = {"gamma": 0.9, "gae_lambda": 0.8, "critic_learning_rate": 1e-2}
    own = f"{MINE}:gae"
    for name, estimator in (("own", own), ("built_in", "gae")):
        run(paths, tmp_path / name, estimator=estimator, num_epochs=2, **settings)
    found, expected = lines_of(tmp_path / "own"), lines_of(tmp_path / "built_in")
    assert len(found) == 8
    for line, other in zip(found, expected, strict=True):
        assert line == pytest.approx(other, rel=1e-5, abs=1e-7)
    assert (tmp_path / "own/checkpoints/latest").exists()


OWN = {
    "policy_loss_type": f"{MINE}:regular",
    "loss_own": CLIP,
    "estimator": f"{MINE}:less_group_mean",
    "reduction": f"{MINE}:trajectory_mean",
}


@pytest.mark.slow
def test_layouts_give_a_loss_the_same_gradients(paths, tmp_path):
    for layout in ("step", "merge", "tree"):
        run(paths, tmp_path / layout, sequence_layout=layout, **OWN)
    names = ("loss", "grad_norm", "policy_loss", "num_trained_tokens")
    steps, *others = (lines_of(tmp_path / layout) for layout in ("step", "merge", "tree"))
    for lines in others:
        for line, expected in zip(lines, steps, strict=True):
            assert line["grad_norm"] > 0
            assert [line[n] for n in names] == pytest.approx([expected[n] for n in names], rel=1e-4)


@pytest.mark.slow
def test_a_run_resumes_with_the_function_and_the_keys_of_its_configuration(paths, tmp_path):
    whole = run(paths, tmp_path / "whole", **OWN)
    run(paths, tmp_path / "run", max_updates=2, **OWN)
    config = train_config(**paths, **COMMON, **OWN, out=str(tmp_path / "run"))
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert saved["loss"]["own"] == CLIP
    assert saved["loss"]["policy_loss_type"] == OWN["policy_loss_type"]
    assert saved["loss"]["reduction"] == OWN["reduction"]
    assert saved["advantage"]["estimator"] == OWN["estimator"]
    changed = train_config(
        **paths, **COMMON, **OWN | {"loss_own": CLIP | {"low": 0.1}}, out=config.run.out
    )
    with pytest.raises(RolloutError, match=r"loss.own: found"):
        trainer.train(changed, resume=True)
    check_same(weights(Path(trainer.train(config, resume=True).checkpoint)), whole)


@pytest.mark.slow
def test_a_dry_run_says_which_functions_with_which_keys(paths, tmp_path, capfd):
    out = str(tmp_path / "run")
    given = ["train", paths["dataset"], "--model", paths["model"], "--out", out, "--dry-run"]
    given += ["--set=data.partial_groups=train", f"--set=loss.policy_loss_type={MINE}:regular"]
    given += [
        "--set=loss.own.low=0.25",
        "--set=loss.own.high=1",
        "--set=loss.reduction=prompt_mean",
    ]
    assert main(given) == 0
    lines = capfd.readouterr().out.splitlines()[-3:]
    file = re.escape(str(ROOT / "tests/helpers/own_functions.py"))
    own = rf"loss.policy_loss_type  {MINE}:regular \({file}:\d+\): low = 0.25, high = 1"
    assert re.fullmatch(own, lines[0])
    assert lines[1:] == [
        "advantage.estimator    grpo: normalize_by_std = true",
        "loss.reduction         prompt_mean",
    ]
    assert main([*given, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)["functions"]
    assert found["loss.policy_loss_type"]["keys"] == {"low": 0.25, "high": 1}
    assert found["loss.reduction"] == {"name": "prompt_mean", "place": None, "keys": {}}
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["loss.policy_loss_type=no_such_file:loss"],
            "no_such_file:loss: cannot import it: Module",
        ),
        (
            ["loss.policy_loss_type=tests.helpers.own_functions:regular"],
            "parameter `low` is neither an input nor",
        ),
        (["loss.own.low=1"], "`low` has no effect"),
    ],
)
def test_functions_are_refused_before_a_model_is_loaded(settings, message, tmp_path, capfd):
    given = ["train", "no_dataset", "--model", "no_model", "--out", str(tmp_path / "run")]
    assert main([*given, *(f"--set={setting}" for setting in settings)]) == 1
    assert message in capfd.readouterr().err


@pytest.mark.slow
def test_a_loss_that_fails_in_a_run_is_named_and_not_called_again(paths, tmp_path, capfd):
    given = ["train", paths["dataset"], "--model", paths["model"], "--out", str(tmp_path / "run")]
    given += ["--set=data.partial_groups=train", f"--set=loss.policy_loss_type={MINE}:fails"]
    given += ["--set=batch.tokens_per_micro_batch=30"]
    own_functions.SEEN.clear()
    assert main(given) == 1
    assert (
        f"{MINE}:fails: found a tensor of shape [] and dtype torch.float32"
        in capfd.readouterr().err
    )
    assert len(own_functions.SEEN) == 1
    with pytest.raises(
        RolloutError, match=f"{MINE}:unlike: it returns the metrics policy_loss/of_"
    ):
        run(paths, tmp_path / "unlike", policy_loss_type=f"{MINE}:unlike")


def test_a_loss_on_the_sampler_needs_its_log_probabilities(paths, tmp_path):
    dataset = write_dataset(tmp_path / "ds", some_trajectories())
    with pytest.raises(RolloutError, match=f"no row has rollout_logprobs, .*{MINE}:rollout_is"):
        run(paths | {"dataset": dataset}, tmp_path, policy_loss_type=f"{MINE}:rollout_is")


def test_the_table_is_the_same_in_the_loop(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text(
        '[model]\npath = "m"\n[loop]\ntasks = "t"\nnum_iterations = 1\n[run]\nout = "o"\n'
        '[generate]\nenvironment = "gsm8k"\ngroup_size = 4\n'
        f'[loss]\npolicy_loss_type = "{MINE}:regular"\n[loss.own]\nlow = 0.1\nhigh = 0.2\n'
    )
    config = load_rl_config(file, ["loss.own.high=0.4"])
    assert config.training.loss.own == {"low": 0.1, "high": 0.4}
    assert config.resolved()["loss"]["own"] == {"low": 0.1, "high": 0.4}
    with pytest.raises(RolloutError, match="`hihg`; expected a parameter of") as error:
        load_rl_config(file, ["loss.own.hihg=0.4"])
    assert error.value.hint == "did you mean `high`?"
