"""From a dataset on disk to planned, masked, loaded batches."""

import numpy as np
import polars as pl
import pytest
import torch
from accelerate import Accelerator
from polars.io.plugins import register_io_source

import pipelines
import rollout_io
from schemas.errors import RolloutError
from tests.helpers.configs import train_config
from tests.helpers.trainer_helpers import (
    VOCAB,
    load_batch,
    make_batch,
    step,
    two_step_trajectory,
    write_dataset,
)
from trainer.batch import groups_with_gradient, index_rows
from trainer.batches.forest import RowLimit, chain_lengths
from trainer.batches.plan import dataset_returns, make_plan
from trainer.config.sections import BatchConfig
from trainer.run.dataset_checks import check_rollout_logprobs, check_rows

LIMIT = RowLimit(num_tokens=100, reason="tokens_per_micro_batch", hint="raise it")


def config(**settings):
    return train_config(dataset="d", model="m", out="o", **{"partial_groups": "train"} | settings)


def returns(*rows):
    """One trajectory per (instance, return, error)."""
    names = [f"{instance}_{i}" for i, (instance, _, _) in enumerate(rows)]
    schema = {"instance_id": pl.String, "return": pl.Float64, "error": pl.String}
    table = pl.DataFrame(rows, schema=schema, orient="row")
    return table.insert_column(1, pl.Series("trajectory_id", names))


def groups(num, *, low=0.0):
    """`num` groups of two, rewarded 1 and `low`."""
    return returns(*((f"g{i}", reward, None) for i in range(num) for reward in (1.0, low)))


def scan(tmp_path, rows, **metadata):
    return rollout_io.scan(write_dataset(tmp_path / "ds", rows, **metadata))


def checked(rollouts, **settings):
    """With an entropy bonus, a trajectory that is alone in its group can learn."""
    made = config(**{"entropy_loss_coef": 0.1} | settings)
    plan = make_plan(pipelines.trajectory_returns(rollouts).collect(), made)
    return check_rows(index_rows(rollouts), plan, made, vocab_size=VOCAB, limit=LIMIT)


@pytest.mark.parametrize(("outcome", "expected"), [(None, 1.0), ("last", 1.0), ("sum", 1.5)])
def test_the_config_chooses_how_returns_are_computed(outcome, expected, tmp_path):
    last = step("g0", 0, 1, [1, 2, 3], [4], reward=1.0, is_last_step=True)
    steps = [step("g0", 0, 0, [1], [2], reward=0.5), last]
    found = dataset_returns(scan(tmp_path, steps), config(outcome=outcome))
    assert found["return"].to_list() == [expected]


def test_batches_follow_first_appearance_and_the_rest_is_a_smaller_batch():
    plan = make_plan(groups(7), config(groups_per_batch=4, groups_per_mini_batch=2))
    assert plan.batches == (("g0", "g1", "g2", "g3"), ("g4", "g5", "g6"))
    mini_batch = plan.trajectories.group_by("instance_id", maintain_order=True).agg(
        pl.col("mini_batch").unique()
    )
    assert mini_batch["mini_batch"].to_list() == [[0], [0], [1], [1], [0], [0], [1]]


def test_one_failure_masks_its_group_or_only_itself():
    table = returns(("a", 1.0, None), ("a", None, "timeout"), ("a", 0.0, None), ("b", 1.0, None))
    group = make_plan(table, config()).trajectories
    alone = make_plan(table, config(failed="trajectory")).trajectories
    assert group["trains"].to_list() == [False, False, False, True]
    assert alone["trains"].to_list() == [True, False, True, True]
    assert group["failed"].to_list() == [False, True, False, False]


def test_failures_never_enter_baselines():
    table = returns(("a", 1.0, None), ("a", None, "timeout"), ("a", 0.0, None))
    plan = make_plan(table, config(failed="trajectory", normalize_by_std=False))
    assert plan.trajectories["advantage"].to_list() == [0.5, 0.0, -0.5]


def test_advantages_do_not_depend_on_the_order_of_scattered_groups():
    table = returns(("b", 1.0, None), ("a", 0.0, None), ("b", 0.0, None), ("a", 4.0, None))
    plan = make_plan(table, config(normalize_by_std=False))
    assert plan.trajectories["advantage"].to_list() == [0.5, -2.0, -0.5, 2.0]
    assert plan.batches == (("b", "a"),)


def test_groups_without_variance_are_counted_and_left_out_only_if_asked():
    table = pl.concat([groups(1), returns(("same", 1.0, None), ("same", 1.0, None))])
    table = pl.concat([table, returns(("one", 1.0, None))])
    assert make_plan(table, config()).batches == (("g0", "same", "one"),)
    plan = make_plan(table, config(drop_zero_variance_groups=True))
    assert plan.batches == (("g0", "one"),)
    assert plan.num_groups_without_variance == 1
    masked = make_plan(table, config(mask_zero_variance_groups=True))
    assert masked.batches == (("g0", "same", "one"),)
    trains = dict(
        masked.trajectories.group_by("instance_id").agg(pl.col("trains").any()).iter_rows()
    )
    assert trains == {"g0": True, "same": False, "one": True}
    assert make_plan(table, config()).num_groups_without_variance == 1


def test_a_plan_that_would_leave_no_group_says_so():
    table = returns(("same", 1.0, None), ("same", 1.0, None))
    with pytest.raises(
        RolloutError,
        match=r"leaves no group to train on: returns do not vary within the only group\b",
    ):
        make_plan(table, config(drop_zero_variance_groups=True))


@pytest.mark.parametrize("outcome", [None, float("nan"), float("inf")])
def test_unknown_outcome_without_an_error_is_refused(outcome):
    with pytest.raises(RolloutError, match=r"trajectory 'a_0'.*\[unknown_outcome\]") as caught:
        make_plan(returns(("a", outcome, None)), config())
    for way in (
        "--rewards",
        "--set loss.policy_loss_type=cross_entropy",
        "filter DS --drop-unknown",
    ):
        assert way in str(caught.value.hint)


def test_gradient_comes_from_groups_with_a_trained_token_whose_advantage_is_not_zero():
    token = ([1], [2], [True])
    rows = [token, token, ([1], [2], [False]), token]
    ids = [("moves", "moves_0"), ("same", "same_0"), ("masked", "masked_0"), ("moves", "moves_1")]
    batch = make_batch(rows, advantages=[0.5, 0.0, 1.0, -0.5], trajectories=ids)
    assert groups_with_gradient(Accelerator(), batch) == {"moves"}


def test_a_batch_asks_the_scan_for_its_own_groups_alone(tmp_path):
    rng = np.random.default_rng(0)
    rows = [row for name in "ab" for row in two_step_trajectory(rng, name, 0, reward=1.0)]
    rollouts = scan(tmp_path, rows)
    whole, handed_out = rollouts.collect(), []

    def source(columns, predicate, _rows, _size):
        found = whole if predicate is None else whole.filter(predicate)
        handed_out.extend(found["instance_id"])
        yield found.select(columns or whole.columns)

    watched = register_io_source(source, schema=whole.schema)
    plan = make_plan(pipelines.trajectory_returns(rollouts).collect(), config())
    for layout in ("step", "merge"):
        load_batch(watched, plan, ["b"], BatchConfig(sequence_layout=layout))
    assert set(handed_out) == {"b"}


@pytest.mark.slow
def test_layouts_hold_the_same_trained_tokens(tmp_path):
    rng = np.random.default_rng(0)
    trajectories = [two_step_trajectory(rng, "a", i, reward=float(i)) for i in range(2)]
    rollouts = scan(tmp_path, [row for t in trajectories for row in t])
    plan = make_plan(pipelines.trajectory_returns(rollouts).collect(), config())
    steps, merged = (
        load_batch(rollouts, plan, ["a"], BatchConfig(sequence_layout=layout))
        for layout in ("step", "merge")
    )
    assert (len(steps.names), len(merged.names)) == (4, 2)
    assert merged.trains.tolist() == ([True] * 4 + [False] * 3 + [True] * 4) * 2
    trained = [batch.responses.values[batch.trains].tolist() for batch in (steps, merged)]
    assert trained[0] == trained[1]
    for batch in (steps, merged):
        advantages = batch.advantages[torch.from_numpy(batch.trains)]
        torch.testing.assert_close(advantages.abs(), torch.full((16,), 0.70710), atol=1e-4, rtol=0)
        assert (advantages[:8] < 0).all()
        assert (advantages[8:] > 0).all()


@pytest.mark.slow
def test_layouts_hold_the_same_rows_from_a_merged_dataset(tmp_path):
    rollouts = scan(tmp_path, two_step_trajectory(np.random.default_rng(0), "a", 0, reward=1.0))
    merged = pipelines.merge(rollouts)
    plan = make_plan(pipelines.trajectory_returns(merged).collect(), config())
    for layout in ("step", "merge"):
        from_steps = load_batch(rollouts, plan, ["a"], BatchConfig(sequence_layout=layout))
        from_merged = load_batch(merged, plan, ["a"], BatchConfig(sequence_layout=layout))
        assert from_steps.responses.values.tolist() == from_merged.responses.values.tolist()
        assert from_steps.responses.offsets.tolist() == from_merged.responses.offsets.tolist()


@pytest.mark.parametrize("last_mask", [[True] * 4, [False] * 4, [True, False, True, False]])
def test_a_merged_row_forwards_as_many_tokens_as_the_longest_of_its_steps(last_mask, tmp_path):
    rows = two_step_trajectory(np.random.default_rng(0), "a", 0, reward=1.0)
    rows[-1]["loss_mask"] = last_mask
    rollouts = scan(tmp_path, rows)
    steps, merged = (
        index_rows(r)["num_forwarded_tokens"] for r in (rollouts, pipelines.merge(rollouts))
    )
    trained = [n for n, row in zip(steps, rows, strict=True) if any(row["loss_mask"])]
    assert merged.to_list() == [max(trained)]


def partial_groups():
    """Groups of three, two (one of them failed) and three."""
    rest = returns(("c", 1.0, None), ("c", 0.0, None), ("c", 1.0, None))
    table = [
        ("a", 1.0, None),
        ("a", 0.0, None),
        ("a", 1.0, None),
        ("b", 1.0, None),
        ("b", None, "x"),
    ]
    return pl.concat([returns(*table), rest])


def test_partial_groups_are_masked_or_train_with_what_is_there_if_asked():
    plan = make_plan(partial_groups(), config(failed="trajectory"))
    assert (plan.group_size, plan.num_partial_groups) == (3, 1)
    assert plan.trajectories["trains"].to_list() == [True] * 4 + [False] + [True] * 3
    masked = make_plan(partial_groups(), config(failed="trajectory", partial_groups="mask"))
    assert masked.trajectories["trains"].to_list() == [True] * 3 + [False] * 2 + [True] * 3
    assert masked.batches == plan.batches


def test_partial_groups_are_refused_by_the_size_of_the_largest_or_the_one_given():
    assert train_config(dataset="d", model="m", out="o").data.partial_groups == "refuse"
    with pytest.raises(RolloutError, match=r"'b': found 2 traj.*expected 3, the size"):
        make_plan(partial_groups(), config(partial_groups="refuse"))
    with pytest.raises(RolloutError, match=r"'a' \(the first of 3\): found 3 traj.*expected 4"):
        make_plan(partial_groups(), config(partial_groups="refuse", group_size=4))


@pytest.mark.parametrize(
    "settings",
    [{"estimator": "reinforce++"}, {"estimator": "gae"}, {"policy_loss_type": "cross_entropy"}],
)
def test_groups_without_a_baseline_may_have_any_size(settings):
    refuse = config(failed="trajectory", partial_groups="refuse", **settings)
    plan = make_plan(partial_groups(), refuse)
    assert plan.num_partial_groups == 0
    assert plan.trajectories["trains"].sum() == 7


def test_masked_trajectories_are_loaded_but_do_not_train(tmp_path):
    failed = step("a", 1, 0, [], [], error="timeout", is_last_step=True)
    rng = np.random.default_rng(0)
    rollouts = scan(tmp_path, [*two_step_trajectory(rng, "a", 0, reward=1.0), failed])
    plan = make_plan(pipelines.trajectory_returns(rollouts).collect(), config())
    batch = load_batch(rollouts, plan, ["a"], BatchConfig(sequence_layout="step"))
    assert len(batch.names) == 3
    assert not batch.trains.any()


def test_rows_without_temperature_or_logprobs_are_filled(tmp_path):
    rng = np.random.default_rng(0)
    rows = two_step_trajectory(rng, "a", 0, reward=1.0, rollout_logprobs=[-1.0] * 4)
    rows[0] |= {"temperature": 0.5, "rollout_logprobs": None}
    rollouts = scan(tmp_path, rows)
    plan = make_plan(pipelines.trajectory_returns(rollouts).collect(), config())
    batch = load_batch(rollouts, plan, ["a"], BatchConfig(sequence_layout="step"))
    assert batch.temperature.tolist() == [0.5] * 4 + [1.0] * 4
    assert batch.rollout_logprobs.isnan().tolist() == [True] * 4 + [False] * 4
    assert batch.names[1] == "trajectory 'a_0', row 1"


def test_index_counts_what_a_chain_forwards(tmp_path):
    rows = [
        step("a", 0, 0, [1, 2], [3, 4, 5], loss_mask=[True, True, False]),
        step("a", 0, 1, [1], [2], loss_mask=[True]),
        step("a", 0, 2, [7, 1], [2, 3], reward=1.0, is_last_step=True),
    ]
    rollouts = scan(tmp_path, rows)
    index = index_rows(rollouts)
    assert index["num_forwarded_tokens"].to_list() == [3, 1, 3]
    plan = make_plan(pipelines.trajectory_returns(rollouts).collect(), config())
    batch = load_batch(rollouts, plan, ["a"], BatchConfig(sequence_layout="step"))
    lengths = chain_lengths(batch.prompts, batch.responses, batch.trains)
    assert lengths.tolist() == index["num_forwarded_tokens"].to_list()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response_ids": [VOCAB] * 4}, f".* found token id {VOCAB}; expected an id from 0 to 60"),
        ({"prompt_token_ids": list(range(61)) * 2}, ".* found 125 tokens to forward"),
        ({"temperature": -1.0}, ".*: found temperature -1.0; expected a finite"),
        ({"loss_mask": [False] * 4}, "d: there are no tokens to train on"),
    ],
)
def test_row_that_cannot_train_is_refused_before_anything_is_trained(tmp_path, change, message):
    row = step("a", 0, 0, [1], [2, 3, 4, 5], reward=1.0, is_last_step=True) | change
    with pytest.raises(RolloutError, match=message):
        checked(scan(tmp_path, [row]))


def test_rows_that_do_not_train_are_not_checked(tmp_path):
    bad = step("a", 0, 0, [1], [VOCAB], reward=1.0, is_last_step=True, loss_mask=[False])
    good = step("b", 0, 0, [1], [2], reward=1.0, is_last_step=True)
    assert checked(scan(tmp_path, [bad, good]))["trajectory_id"].to_list() == ["b_0"]


def sampled(tmp_path, **values):
    defaults = {"reward": 1.0, "is_last_step": True, "rollout_logprobs": [-1.0]}
    return checked(scan(tmp_path, [step("a", 0, 0, [1], [2], **(defaults | values))]))


@pytest.mark.parametrize(
    "values", [{}, {"temperature": 1.0, "top_p": 1.0, "top_k": -1}, {"top_k": 0}]
)
def test_correction_applies_where_the_sampled_distribution_is_recorded(tmp_path, values):
    rows = sampled(tmp_path, **values)
    assert check_rollout_logprobs(rows, config(), "raw")
    assert not check_rollout_logprobs(rows, config(tis_ratio_type=None), "raw")


def test_correction_is_off_without_logprobs(tmp_path):
    rows = sampled(tmp_path, rollout_logprobs=None, temperature=0.5)
    assert not check_rollout_logprobs(rows, config(), "raw")


@pytest.mark.parametrize("values", [{"temperature": 0.5}, {"top_p": 0.9}, {"top_k": 20}])
def test_correction_with_another_distributions_logprobs_is_refused(tmp_path, values):
    rows = sampled(tmp_path, **values)
    for mode in ("raw", None):
        with pytest.raises(RolloutError, match="are not from the sampled distribution"):
            check_rollout_logprobs(rows, config(), mode)
    if "temperature" in values:
        assert check_rollout_logprobs(rows, config(), "processed")
    else:
        with pytest.raises(RolloutError, match="sampling_support does not record them") as error:
            check_rollout_logprobs(rows, config(), "processed")
        assert "top_k of at most 20" in (error.value.hint or "")
    assert check_rollout_logprobs(rows, config(allow_mismatched_logprobs=True), "raw")
    assert not check_rollout_logprobs(rows, config(tis_ratio_type=None), "raw")


def test_correction_of_retokenized_text_is_refused(tmp_path):
    rows = sampled(tmp_path, token_source="retokenized")
    with pytest.raises(RolloutError, match="re-tokenized"):
        check_rollout_logprobs(rows, config(), "raw")


def test_logprobs_in_a_part_of_the_rows_are_refused(tmp_path):
    rows = two_step_trajectory(np.random.default_rng(0), "a", 0, reward=1.0)
    rows[1]["rollout_logprobs"] = [-1.0] * 4
    index = checked(scan(tmp_path, rows))
    with pytest.raises(RolloutError, match=r"row 0.* rollout_logprobs is null here but present"):
        check_rollout_logprobs(index, config(), "raw")
