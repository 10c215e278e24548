"""Functions of the user's: what they take, what is refused and how, by name."""

import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import RolloutError
from tests.helpers.configs import SECTIONS, train_config
from tests.helpers.losses_helpers import SETTINGS, advantages_of_returns, policy_loss, targets
from trainer.algorithms.advantages import CriticAdvantages
from trainer.algorithms.losses import Targets, TokenLoss
from trainer.algorithms.reductions import Units, reduction_weights
from trainer.config.functions import (
    ADVANTAGE_ESTIMATOR,
    KINDS,
    LOSS_REDUCTION,
    POLICY_LOSS,
    bind,
    find,
    inputs_of,
)
from trainer.config.sections import AdvantageConfig, LossConfig
from trainer.config.train_config import load_config, uses
from trainer.run.batch_advantages import advantages_of_rewards

HERE = __name__
PATHS = {"dataset": "d", "model": "m", "out": "o"}


def clipped(logprobs, old_logprobs, advantages, **keys):
    assert keys == {"beta": 2}
    ratio = (logprobs - old_logprobs).clamp(-20, 20).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.3) * advantages)


def with_metrics(logprobs, rollout_logprobs, beta=0.5):
    losses = beta * (rollout_logprobs - logprobs)
    return TokenLoss(losses, losses > 0, {"distance": losses.detach()})


def editing(logprobs, old_logprobs, advantages, row):
    losses = -advantages * logprobs
    for values in (old_logprobs, row):
        values.zero_()
    advantages.numpy()[:] = 7
    return losses


def scaled(logprobs, advantages, *, sapo_tau_pos, beta):
    return -sapo_tau_pos * beta * advantages * logprobs


def zeros(logprobs, make):
    made = {
        "sum": logprobs.sum(),
        "number": 0.0,
        "none": None,
        "long": torch.cat([logprobs, logprobs]),
        "float32": logprobs.float(),
        "int": torch.zeros(len(logprobs), dtype=torch.int64),
        "detached": logprobs.detach(),
        "nan": logprobs * torch.tensor(float("nan")),
        "inf": logprobs / 0,
        "clipped": TokenLoss(logprobs, logprobs),
        "metrics": TokenLoss(logprobs, logprobs > 0, {"mean": logprobs.mean()}),
        "names": TokenLoss(logprobs, logprobs > 0, [logprobs]),  # type: ignore[arg-type]
    }
    return made[make]


def raising(logprobs):
    raise IndexError(f"{len(logprobs)} is too many")


def centred(returns, scale=1.0):
    returns -= returns.mean()  # in place
    return scale * returns


def by_group(rewards, trajectory, group_index):
    return torch.from_numpy(rewards - group_index + trajectory)


def with_critic(rewards, values, make="pair"):
    made = {
        "pair": CriticAdvantages(rewards - values, rewards),
        "array": rewards,
        "short": CriticAdvantages(rewards, rewards[:-1]),
    }
    return made[make]


def arrays(returns, make):
    made = {
        "text": ["a"] * len(returns),
        "none": None,
        "short": returns[1:],
        "column": returns[:, None],
        "nan": returns * np.nan,
        "graph": torch.ones(len(returns), requires_grad=True),
        "ragged": [[1.0], [1.0, 2.0]],
    }
    return made[make]


def by_row(row, num_rows):
    return 1 / (num_rows * np.bincount(row)[row])


def not_finite(num_targets):
    return [float("inf")] * num_targets


class Losses:
    """A callable of another kind."""

    def __call__(self, logprobs):
        return -logprobs


instance = Losses()
NOT_CALLABLE = 3


def no_logprobs(log_probs, advantages):
    return log_probs * advantages


def skyrl_names(logprobs, old_log_probs, advantages):
    return logprobs * advantages * old_log_probs


def positional(logprobs, /):
    return logprobs


def variadic(*logprobs):
    return logprobs


def both(returns, rewards):
    return returns + rewards


def mixed(returns, values):
    return returns + values


def typed(logprobs, beta: float, power: int, name: str, *, on: bool = True):
    return logprobs * beta**power * len(name) * on


def config(**settings):
    return train_config(**PATHS, **settings)


def own(function):
    return f"{HERE}:{function.__name__}"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.key)
def test_built_in_functions_take_what_their_table_says(kind):
    for name in kind.built_in:
        function = find(kind, name)
        assert function.inputs == inputs_of(kind, name), name
        fields = SECTIONS[kind.section].__dataclass_fields__
        assert function.keys.keys() <= fields.keys(), name
        assert function.inputs - {"selected", "divergence"} <= {*kind.inputs}, name


def test_the_page_and_the_keys_name_every_function_and_input():
    page = (Path(__file__).parents[3] / "docs/algorithms.md").read_text(encoding="utf-8")
    for kind in KINDS:
        [line] = [row for row in page.splitlines() if row.startswith(f"| `{kind.path}` | ")]
        assert [name for name in kind.inputs if f"`{name}`" not in line] == []
        assert [name for name in kind.built_in if f"| `{name}`" not in page] == []
        source = inspect.getsource(LossConfig) + inspect.getsource(AdvantageConfig)
        assert [name for name in kind.built_in if f"`{name}`" not in source] == []


@settings(deadline=None)
@given(x=targets())
def test_a_loss_gets_its_tensors_and_keys_by_name(x):
    c = LossConfig(policy_loss_type=own(clipped), own={"beta": 2}, **SETTINGS)
    regular = LossConfig(policy_loss_type="regular", **SETTINGS)
    found, expected = (
        policy_loss(x, bind(POLICY_LOSS, c)),
        policy_loss(x, bind(POLICY_LOSS, regular)),
    )
    assert torch.equal(found.losses, expected.losses)
    assert not found.clipped.any()
    one, other = (torch.autograd.grad(v.losses.sum(), x.logprobs)[0] for v in (found, expected))
    assert torch.equal(one, other)
    c = LossConfig(policy_loss_type=own(scaled), own={"beta": 3}, sapo_tau_pos=2.0)
    assert torch.equal(
        policy_loss(x, bind(POLICY_LOSS, c)).losses, -2.0 * 3 * x.advantages * x.logprobs
    )


@settings(deadline=None)
@given(x=targets())
def test_a_loss_may_return_what_it_clipped_and_metrics(x):
    found = policy_loss(x, bind(POLICY_LOSS, LossConfig(policy_loss_type=own(with_metrics))))
    assert torch.equal(found.clipped, x.rollout_logprobs > x.logprobs)
    assert list(found.metrics) == ["policy_loss/distance"]
    assert torch.equal(found.metrics["policy_loss/distance"], found.losses.detach())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            "sum",
            r"found a tensor of shape \[\] and dtype torch.float64; expected a tensor of shape \[3\]",
        ),
        ("number", "found a value of type float; expected a tensor"),
        ("none", "found a value of type NoneType; expected a tensor"),
        ("long", r"found a tensor of shape \[6\] and dtype torch.float64"),
        ("float32", r"found a tensor of shape \[3\] and dtype torch.float32"),
        ("int", r"found a tensor of shape \[3\] and dtype torch.int64"),
        ("detached", "found losses without a gradient; expected losses computed from `logprobs`"),
        ("nan", "found nan at target 0, whose log-probability is -1; expected finite"),
        ("inf", "found -inf at target 0"),
        ("clipped", r"clipped: found a tensor of .* dtype torch.float64; .* dtype torch.bool"),
        ("metrics", r"metrics\['mean'\]: found a tensor of shape \[\]"),
        ("names", "metrics: found a value of type list"),
    ],
)
def test_a_loss_that_does_not_fit_is_named(make, message):
    x = some_targets(3)
    c = LossConfig(policy_loss_type=own(zeros), own={"make": make})
    where = f"{own(zeros)}(: |, )"
    with pytest.raises(RolloutError, match=f"{where}{message}") as error:
        policy_loss(x, bind(POLICY_LOSS, c))
    if make == "sum":
        assert error.value.hint == "return one loss per target; loss.reduction reduces the losses"


def test_a_loss_that_edits_its_inputs_edits_copies():
    x, before = some_targets(3), some_targets(3)
    found = policy_loss(x, bind(POLICY_LOSS, LossConfig(policy_loss_type=own(editing))))
    found.losses.sum().backward()
    assert x.logprobs.grad is not None
    for name in ("logprobs", "old_logprobs", "rollout_logprobs", "advantages", "row", "selected"):
        assert torch.equal(getattr(x, name), getattr(before, name))


def some_targets(num):
    values = -torch.arange(1.0, num + 1, dtype=torch.float64)
    return Targets(
        logprobs=values.clone().requires_grad_(),
        old_logprobs=values,
        rollout_logprobs=values,
        advantages=values,
        row=torch.zeros(num, dtype=torch.int64),
        selected=torch.zeros(num, dtype=torch.bool),
    )


def test_what_a_function_raises_is_its_own_with_its_line():
    with pytest.raises(RolloutError) as error:
        policy_loss(some_targets(3), bind(POLICY_LOSS, LossConfig(policy_loss_type=own(raising))))
    line = inspect.getsourcelines(raising)[1] + 1
    expected = f"{own(raising)}: raised IndexError: 3 is too many ({__file__}:{line})."
    assert str(error.value) == f"{expected} [policy_loss_type_raised]"
    assert isinstance(error.value.__cause__, IndexError)
    empty = policy_loss(
        some_targets(0), bind(POLICY_LOSS, LossConfig(policy_loss_type=own(raising)))
    )
    assert (len(empty.losses), empty.clipped.dtype) == (0, torch.bool)


@given(st.lists(st.floats(-5, 5), max_size=6))
def test_an_estimator_gets_copies_and_returns_any_numbers(values):
    returns, group = np.array(values), np.zeros(len(values), np.int64)
    c = config(estimator=own(centred), advantage_own={"scale": 2})
    found = advantages_of_returns(returns, group, bind(ADVANTAGE_ESTIMATOR, c.advantage))
    assert returns.tolist() == values
    assert found.dtype == np.float64
    assert found == pytest.approx(2 * (returns - returns.mean() if values else returns))
    rewards, which = np.arange(3.0), np.array([0, 0, 1])
    c = config(estimator=own(by_group))
    found, critic = advantages_of_rewards(
        rewards, which, which, None, bind(ADVANTAGE_ESTIMATOR, c.advantage)
    )
    assert (found.tolist(), critic) == ([0.0, 1.0, 2.0], None)


def test_an_estimator_that_takes_values_has_a_critic():
    c = config(estimator=own(with_critic), critic_model="c")
    assert c.advantage.needs_critic
    assert c.advantage.by_token
    rewards, which = np.arange(3.0), np.zeros(3, np.int64)
    advantages, value_targets = advantages_of_rewards(
        rewards, which, which, np.ones(3), bind(ADVANTAGE_ESTIMATOR, c.advantage)
    )
    assert value_targets is not None
    assert (advantages.tolist(), value_targets.tolist()) == ([-1, 0, 1], [0, 1, 2])
    for make, message in (
        ("array", "found a value of type ndarray; .* CriticAdv"),
        ("short", r"shape \[2\]; .* value"),
    ):
        c = config(estimator=own(with_critic), advantage_own={"make": make})
        with pytest.raises(RolloutError, match=f"{own(with_critic)}: .*{message}"):
            advantages_of_rewards(
                rewards, which, which, np.ones(3), bind(ADVANTAGE_ESTIMATOR, c.advantage)
            )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        ("text", "found a value of type list and dtype <U1; expected"),
        ("none", "found a value of type NoneType; expected"),
        (
            "short",
            r"found shape \[2\]; expected an array of 3 finite numbers with the advantage of each traj",
        ),
        ("column", r"found shape \[3, 1\]"),
        ("nan", "found nan at element 0"),
        ("graph", "found a value of type Tensor, which NumPy .*requires grad"),
        ("ragged", r"found a value of type list, which NumPy cannot convert \("),
    ],
)
def test_advantages_that_do_not_fit_are_named(make, message):
    c = config(estimator=own(arrays), advantage_own={"make": make})
    with pytest.raises(RolloutError, match=f"{own(arrays)}: {message}"):
        advantages_of_returns(
            np.arange(3.0), np.zeros(3, np.int64), bind(ADVANTAGE_ESTIMATOR, c.advantage)
        )


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_a_reduction_gets_its_arrays_by_name(rows):
    row = np.sort(np.array(rows))
    ids = dict.fromkeys(("row", "trajectory", "group", "micro_batch"), row)
    totals = ("num_rows", "num_trajectories", "num_groups", "num_micro_batches")
    units = Units(**ids, **dict.fromkeys(totals, 5))
    found = reduction_weights(units, bind(LOSS_REDUCTION, LossConfig(reduction=own(by_row))))
    expected = reduction_weights(units, bind(LOSS_REDUCTION, LossConfig(reduction="sequence_mean")))
    assert found.tolist() == expected.tolist()
    with pytest.raises(RolloutError, match=f"{own(not_finite)}: found inf at elem"):
        reduction_weights(units, bind(LOSS_REDUCTION, LossConfig(reduction=own(not_finite))))


@pytest.mark.parametrize(
    ("settings_", "message", "hint"),
    [
        (
            {"policy_loss_type": "dapo"},
            "policy_loss_type: found dapo; expected one of regular",
            None,
        ),
        ({"policy_loss_type": "sap"}, ", or module:function", "did you mean `sapo`?"),
        ({"estimator": "grop"}, "expected one of grpo, rloo, maxrl", "`grpo`"),
        ({"reduction": "mean"}, "expected one of token_mean", None),
        ({"policy_loss_type": "no_such_module:f"}, "ModuleNotFoundError", "PYTHONPATH"),
        ({"policy_loss_type": f"{HERE}:none"}, "AttributeError", None),
        (
            {"policy_loss_type": f"{HERE}:NOT_CALLABLE"},
            "found a value of type int; expected a",
            None,
        ),
        (
            {"policy_loss_type": own(no_logprobs)},
            "parameters that include logprobs",
            "did you mean `logprobs`?",
        ),
        (
            {"policy_loss_type": own(skyrl_names)},
            "parameter `old_log_probs` is neither",
            "`old_logprobs`?",
        ),
        (
            {"policy_loss_type": own(scaled)},
            "parameter `beta` is neither",
            "inputs of loss.policy_loss_type",
        ),
        ({"policy_loss_type": own(positional)}, "cannot be passed by name", None),
        ({"policy_loss_type": own(variadic)}, "cannot be passed by name", None),
        ({"estimator": own(both)}, "exactly one of returns, separate_rewards, rewards", None),
        ({"estimator": own(mixed)}, "found returns and values; expected rewards", None),
        ({"reduction": own(centred)}, "at least one of num_targets, row", None),
        ({"estimator": own(centred), "critic_model": "c"}, "that takes `values`", None),
    ],
)
def test_functions_are_checked_with_the_configuration(settings_, message, hint):
    with pytest.raises(RolloutError) as error:
        config(**settings_)
    assert message in str(error.value)
    assert hint is None or hint in (error.value.hint or "")


TYPED = {"policy_loss_type": own(typed)}
GOOD = {"beta": 1, "power": 2, "name": "a"}


@pytest.mark.parametrize(
    ("table", "message", "hint"),
    [
        (GOOD | {"bta": 1}, f"`bta`; expected a parameter of {own(typed)}", "mean `beta`?"),
        (GOOD | {"zzzz": 1}, "`zzzz`", "use one of beta, name, on, power"),
        (GOOD | {"beta": "a"}, f"a parameter of {own(typed)}: found 'a'; expected a number", None),
        (GOOD | {"beta": True}, "found True; expected a number", None),
        (GOOD | {"power": 1.5}, "found 1.5; expected a whole number", None),
        (GOOD | {"name": 1}, "found 1; expected text", None),
        (GOOD | {"on": 1}, "found 1; expected true or false", None),
        (GOOD | {"eps_clip_low": 0.1}, "`eps_clip_low`", "set loss.eps_clip_low"),
        (GOOD | {"beta": float("nan")}, "loss.own.beta", None),
        (GOOD | {"beta": np.float32(1)}, "lists and tables of these", None),
    ],
)
def test_keys_are_checked_with_the_configuration(table, message, hint):
    assert config(**TYPED, loss_own=GOOD).loss.own == GOOD
    with pytest.raises(RolloutError) as error:
        config(**TYPED, loss_own=table)
    assert message in str(error.value)
    assert hint is None or hint in (error.value.hint or "")


def test_built_in_functions_have_no_keys_of_their_own():
    with pytest.raises(RolloutError, match="`eps_clip_hgh` has no effect") as error:
        config(loss_own={"eps_clip_hgh": 0.1})
    assert error.value.hint == "did you mean `loss.eps_clip_high`?"


def test_keys_come_from_a_table_and_from_overrides(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text(
        f'[loss]\npolicy_loss_type = "{own(typed)}"\n[loss.own]\nbeta = 1.5\npower = 2\nname = "a"'
    )
    paths = ["data.dataset=d", "model.path=m", "run.out=o"]
    found = load_config(file, [*paths, "loss.own.beta=2.5", "loss.own.name=b"])
    assert found.loss.own == {"beta": 2.5, "power": 2, "name": "b"}
    assert (
        load_config(file, [*paths, "loss.own={beta=1, power=1, name='c'}"]).loss.own["name"] == "c"
    )
    with pytest.raises(RolloutError, match="unknown key `beta`") as error:
        load_config(file, [*paths, "loss.beta=1"])
    assert "`loss.own.beta`" in (error.value.hint or "")


def test_what_a_function_takes_decides_what_a_run_needs():
    plain = config(policy_loss_type=own(scaled), loss_own={"beta": 1})
    assert not plain.loss.is_supervised
    assert plain.loss.importance_weights == "token"
    assert plain.loss.needs_old_logprobs  # for the weights
    assert not config(
        policy_loss_type=own(scaled), loss_own={"beta": 1}, tis_ratio_type=None
    ).loss.needs_old_logprobs
    sampler = config(policy_loss_type=own(with_metrics), loss_own={"beta": 1})
    assert sampler.loss.is_supervised
    assert sampler.loss.is_anchored_on_sampler
    assert sampler.loss.importance_weights is None
    assert config(
        policy_loss_type=own(with_metrics), tis_ratio_type="token"
    ).loss.importance_weights
    assert config(policy_loss_type=f"{HERE}:instance").loss.is_supervised


def test_the_use_of_a_function_is_a_line_with_its_keys():
    c = config(policy_loss_type=own(scaled), loss_own={"beta": 2}, estimator=own(centred))
    found = uses(c)
    line = inspect.getsourcelines(scaled)[1]
    place = f"({__file__}:{line})"
    assert (
        str(found["loss.policy_loss_type"])
        == f"{own(scaled)} {place}: sapo_tau_pos = 1.0, beta = 2"
    )
    assert found["advantage.estimator"].settings == {"scale": 1.0}
    assert str(found["loss.reduction"]) == "token_mean"
    assert list(uses(config(policy_loss_type="cross_entropy"))) == [
        "loss.policy_loss_type",
        "loss.reduction",
    ]


@pytest.mark.slow
def test_public_types_import_no_torch_before_they_are_used():
    code = (
        "import sys, trainer\n"
        "c = trainer.LossConfig(policy_loss_type='gspo')\n"
        "assert c.is_anchored_on_sampler is False\n"
        "trainer.CriticAdvantages\n"
        "assert 'torch' not in sys.modules\n"
        "assert trainer.TokenLoss._fields == ('losses', 'clipped', 'metrics')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
