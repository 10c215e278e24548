"""Training on trees is training on steps: the same loss, the same gradient of every parameter."""

import dataclasses
import itertools

import pytest
import torch
from accelerate import Accelerator
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.helpers.losses_helpers import CORRECTIONS, POLICY_LOSSES, REDUCTIONS, TERMS, named
from tests.helpers.trainer_helpers import (
    make_batch,
    plain_logprobs,
    relative_difference,
    run_of,
    tiny_policy,
)
from tests.helpers.tree_helpers import (
    batch_of,
    batch_of_estimator,
    check_same,
    config_of,
    families,
    mini_batch_of,
    noises,
    updated,
)
from tests.trainer.algorithms.test_advantages_critic import (
    all_gradients,
    run_of_critic,
    tiny_critic,
)
from trainer.loss import critic_values, policy_logprobs
from trainer.models.layers import recompute_layers
from trainer.models.lora import add_adapter
from trainer.run.batch_advantages import estimate_advantages
from trainer.update import update_critic

ESTIMATORS = ("grpo", "rloo", "maxrl", "reinforce++", "gae")
BUDGETS = st.sampled_from([25, 40, 4096])
SCOPES = st.sampled_from(["trajectory", "group"])
POLICY = tiny_policy()
REFERENCE = tiny_policy(seed=3)
CRITIC = tiny_critic()


def check_layouts_agree(family, config, seed, budget, scope):
    """Advantages, old and reference log-probabilities and the update, each by either layout."""
    batch = batch_of_estimator(family, config_of(**config), seed)
    moved = 0.3 * torch.tensor([noise - 0.5 for row in family[0] for noise in noises(row, 2)])
    found = []
    for layout in ("step", "tree"):
        how = {"sequence_layout": layout, "tree_scope": scope, "tokens_per_micro_batch": budget}
        forests = mini_batch_of(batch, **how).forests
        learner, critic = run_of(POLICY, **config), run_of_critic(CRITIC)
        values = critic_values(critic, batch, forests)
        estimates = estimate_advantages(
            Accelerator(), dataclasses.replace(batch, values=values), config_of(**config).advantage
        )
        if estimates.value_targets is not None:
            errors = (estimates.value_targets - values)[torch.from_numpy(batch.trains)]
            assume(errors.std(correction=0) > 0.1)  # whitening equal ones would show rounding
        given = dataclasses.replace(batch, advantages=estimates.advantages)
        old = policy_logprobs(learner, batch, forests) + moved
        ref = policy_logprobs(learner, batch, forests, REFERENCE)
        ref_given = ref if config.get("kl_loss_coef") else None
        found.append(updated(POLICY, given, forests, old, ref_given, corrects=True, **config))
    whitens = config.get("estimator") == "gae"
    check_same(found[1], found[0], tolerance=1e-4 if whitens else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("loss", POLICY_LOSSES, ids=named)
@settings(max_examples=6, deadline=None)
@given(
    families(),
    st.sampled_from(REDUCTIONS),
    st.sampled_from(ESTIMATORS),
    st.sampled_from([{}, *TERMS]),
    st.integers(0, 99),
    BUDGETS,
    SCOPES,
)
def test_every_loss_with_some_reduction_estimator_and_term(
    loss, family, reduction, estimator, term, seed, budget, scope
):
    config = {"tis_ratio_type": None} | loss | term | reduction
    config |= {} if loss["policy_loss_type"] == "cross_entropy" else {"estimator": estimator}
    check_layouts_agree(family, config, seed, budget, scope)


@pytest.mark.slow
@pytest.mark.parametrize("correction", CORRECTIONS, ids=named)
@settings(max_examples=4, deadline=None)
@given(families(), st.integers(0, 99), BUDGETS)
def test_every_correction_for_the_sampler(correction, family, seed, budget):
    check_layouts_agree(family, correction, seed, budget, "group")


PRODUCT = [
    loss | reduction | {"estimator": estimator}
    for loss, reduction, estimator in itertools.product(POLICY_LOSSES, REDUCTIONS, ESTIMATORS)
    if (loss["policy_loss_type"], estimator) != ("cross_entropy", "gae")
]


@pytest.mark.nightly
@pytest.mark.parametrize("config", PRODUCT, ids=named)
@settings(max_examples=examples(10), deadline=None)
@given(families(), st.integers(0, 99), BUDGETS, SCOPES)
def test_every_loss_with_every_reduction_and_estimator(config, family, seed, budget, scope):
    check_layouts_agree(family, {"tis_ratio_type": None} | config, seed, budget, scope)


@settings(max_examples=examples(15), deadline=None)
@given(families(), BUDGETS)
def test_log_probabilities_are_those_of_one_plain_forward_a_row(family, budget):
    batch = batch_of(family)
    forests = mini_batch_of(batch, tokens_per_micro_batch=budget).forests
    found = policy_logprobs(run_of(POLICY), batch, forests)
    with torch.no_grad():
        expected = plain_logprobs(POLICY.model, family[0])
    trains = torch.from_numpy(batch.trains)
    torch.testing.assert_close(found[trains], expected[trains], rtol=1e-5, atol=1e-5)
    assert found[~trains].isnan().all()


@settings(max_examples=examples(10), deadline=None)
@given(families(), BUDGETS, st.integers(0, 99))
def test_the_critics_gradient_is_that_of_steps(family, budget, seed):
    config = config_of(estimator="gae")
    batch = batch_of_estimator(family, config, seed)
    found = []
    for layout in ("step", "tree"):
        how = {"sequence_layout": layout, "tokens_per_micro_batch": budget}
        forests = mini_batch_of(batch, **how).forests
        critic = tiny_critic()
        learner = run_of_critic(critic, max_grad_norm=1e9, critic_learning_rate=1e-30)
        values = critic_values(learner, batch, forests)
        targets = estimate_advantages(
            Accelerator(), dataclasses.replace(batch, values=values), config.advantage
        ).value_targets
        assert targets is not None
        kept = []
        learner.critic_optimizer.register_step_pre_hook(
            lambda *_, c=critic, kept=kept: kept.append(all_gradients(c))
        )
        batch = dataclasses.replace(batch, values=values + 0.1, value_targets=targets)
        metrics = update_critic(learner, batch, forests)
        found.append((metrics, kept[0]))
    (steps, expected), (trees, gradient) = found
    assert trees == pytest.approx(steps, rel=1e-4, abs=1e-5)
    assert relative_difference(gradient, expected) < 1e-5


def adapted():
    policy = tiny_policy()
    add_adapter(policy, config_of(lora_rank=4).model)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1, generator=generator)
    return policy


def recomputing():
    policy = tiny_policy(chunk=3)
    recompute_layers(policy.model)
    return policy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "like"), [(adapted, adapted), (recomputing, tiny_policy)], ids=["lora", "checkpoints"]
)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@settings(max_examples=5, deadline=None)
@given(families(), st.integers(0, 99))
def test_adapters_and_gradient_checkpointing(make, like, family, seed):
    batch = batch_of_estimator(family, config_of(), seed)
    found = [
        updated(policy, batch, mini_batch_of(batch, sequence_layout=layout).forests, None, None)
        for policy, layout in ((like(), "step"), (make(), "tree"))
    ]
    check_same(found[1], found[0])


def test_a_token_that_several_rows_sampled_counts_for_each_of_them():
    row = ([1, 2, 3], [4, 5, 6], [True, True, True])
    batch = make_batch(
        [row] * 3, trajectories=[("a", f"a_{n}") for n in range(3)], advantages=[1.0, 0.5, -0.25]
    )
    once = make_batch([row], advantages=[1.25 / 3])
    forests = mini_batch_of(batch).forests
    assert [forest.num_tokens for forest in forests] == [5]
    _, gradient = updated(POLICY, batch, forests, None, None)
    _, expected = updated(POLICY, once, mini_batch_of(once).forests, None, None)
    for name, wanted in expected.items():
        torch.testing.assert_close(gradient[name], wanted, rtol=1e-5, atol=1e-6)
