"""Datasets with recorded experts: the layouts agree, and no run ignores them unless it is told to."""

import asyncio
import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

import pipelines
import rollout_io
import trainer
from pipelines.generation import Sampling
from schemas.errors import RolloutError
from tests.helpers.configs import train_config
from tests.helpers.examples import examples
from tests.helpers.rl_helpers import HERE, lines_of
from tests.helpers.rl_helpers import config_of as rl_config_of
from tests.helpers.routing_helpers import (
    NUM_EXPERTS,
    ROUTING,
    choice_of,
    random_routes,
    routes_of,
    steady_routes,
    tiny_moe,
    write_routed,
)
from tests.helpers.trainer_helpers import (
    group_rows,
    load_batch,
    metrics_of,
    run_of,
    save_tiny_model,
    step,
    tiny_llama,
)
from tests.helpers.tree_helpers import (
    batch_of,
    check_same,
    config_of,
    families,
    updated,
)
from trainer import rl
from trainer.batch import cut_batch
from trainer.batches.plan import make_plan
from trainer.config.sections import BatchConfig
from trainer.engine.embedded import TransformersEngine
from trainer.loss import policy_logprobs
from trainer.models.policy import Policy, load_policy

POLICY = Policy(tiny_moe(), logprob_chunk_tokens=16)


def routed_rows(apart=(), num_groups=2):
    """Groups of two trajectories of two steps each, with routes of all tokens but the last.

    Args:
        apart: Second steps, counted over all trajectories, that were routed differently from a
            token on which the first step has, too.
        num_groups: Of them.
    """
    rows = group_rows(num_groups, (1.0, 0.0))
    for number, row in enumerate(rows):
        tokens = row["prompt_token_ids"] + row["response_ids"]
        row[ROUTING] = steady_routes(tokens)[:-1]
        if row["step_index"] and number // 2 in apart:
            row[ROUTING][4:] = steady_routes(tokens, salt=1)[4:-1]
    return rows


def updates_of(dataset, layout, **settings):
    """The batch, its log-probabilities in the order of the steps, an update, tokens forwarded."""
    rollouts = rollout_io.scan(dataset)
    config = config_of(sequence_layout=layout, **settings)
    plan = make_plan(pipelines.trajectory_returns(rollouts, "last").collect(), config)
    batch = load_batch(rollouts, plan, plan.batches[0], BatchConfig(sequence_layout=layout))
    (mini_batch,) = cut_batch(batch, config.batch)
    logprobs = policy_logprobs(run_of(POLICY), batch, mini_batch.forests)
    update = updated(POLICY, batch, mini_batch.forests, None, None)
    num_tokens = sum(forest.num_tokens for forest in mini_batch.forests)
    return batch, logprobs[batch.chains.slots], update, num_tokens


@pytest.mark.slow
@pytest.mark.parametrize("budget", [40, 2048])
@pytest.mark.parametrize("apart", [(), (0,), (0, 1, 3)], ids=str)
def test_step_merge_and_tree_agree_also_where_shared_tokens_were_routed_differently(
    tmp_path, apart, budget
):
    dataset = write_routed(tmp_path / "ds", routed_rows(apart))
    merged = tmp_path / "merged"
    with rollout_io.RolloutWriter(merged) as writer:
        writer.write(pipelines.merge(rollout_io.scan(dataset)).collect().to_arrow())
    how = {"tokens_per_micro_batch": budget}
    _, logprobs, update, num_steps = updates_of(dataset, "step", **how)
    for source in (dataset, str(merged)):
        for layout in ("step", "merge", "tree"):
            batch, found, other, num_tokens = updates_of(source, layout, **how)
            assert (found - logprobs).abs().max() < 1e-5
            check_same(other, update)
            rows = {"step": 8, "merge": 4 + len(apart), "tree": 8}
            assert len(batch.names) == rows[layout]
            assert layout == "step" or num_tokens < num_steps


@given(families(), st.integers(0, 99), st.sampled_from([0.0, 0.1, 0.5]), st.integers(0, 9))
@settings(max_examples=examples(15), deadline=None)
def test_trees_of_any_rows_and_routes_agree_with_steps(family, seed, share, fewest):
    rng, parts = np.random.default_rng(seed), []
    for prompt, response, _ in family[0]:
        part = torch.tensor(steady_routes(prompt + response)[:-1], dtype=torch.int16)
        other = torch.from_numpy(rng.random(len(part)) < share)
        part[other] = random_routes(rng, int(other.sum()))
        parts.append(part[: max(fewest, int(rng.integers(0, 2 * len(part) + 1)))])
    batch = dataclasses.replace(batch_of(family), routes=routes_of(parts))
    found = []
    for layout in ("step", "tree"):
        (mini_batch,) = cut_batch(
            batch, config_of(sequence_layout=layout, tree_scope="group").batch
        )
        found.append(updated(POLICY, batch, mini_batch.forests, None, None))
    check_same(found[1], found[0])


@st.composite
def routed_steps(draw):
    """A trajectory whose steps mostly continue each other, and were mostly routed alike.

    Routes cover any leading part, or nothing; masks leave any tokens out.
    """
    token, rows = st.integers(0, 3), []
    tokens = []
    num_steps = draw(st.integers(1, 4))
    for index in range(num_steps):
        prompt = tokens + draw(st.lists(token, min_size=1, max_size=3))
        response = draw(st.lists(token, min_size=1, max_size=4))
        tokens = prompt + response
        mask = draw(st.lists(st.booleans(), min_size=len(response), max_size=len(response)))
        routes = steady_routes(tokens)
        if draw(st.integers(0, 3)) == 0:
            at = draw(st.integers(0, len(routes) - 1))
            routes[at] = steady_routes(tokens, salt=1)[at]
        end = draw(st.sampled_from([len(tokens) - 1, len(tokens), 1, len(prompt), None]))
        row = step("g0", 0, index, prompt, response, reward=1.0, loss_mask=mask)
        row |= {ROUTING: None if end is None else routes[:end], "is_last_step": False}
        rows.append(row)
        if draw(st.integers(0, 4)) == 0:
            tokens = tokens[:-1]
    rows[0]["loss_mask"][-1] = rows[-1]["is_last_step"] = True
    rows[0][ROUTING] = rows[0][ROUTING] or steady_routes(rows[0]["prompt_token_ids"])
    return rows


@pytest.mark.slow
@given(routed_steps())
@settings(max_examples=examples(25), deadline=None)
def test_merged_rows_come_apart_where_steps_were_routed_differently(rows):
    with tempfile.TemporaryDirectory() as folder:
        steps = rollout_io.scan(write_routed(Path(folder) / "ds", rows))
        for rule in ("lineage", "consecutive"):
            found = pipelines.part_by_routes(pipelines.merge(steps, rule)).collect()
            expected = pipelines.merge(steps, rule, same_routes=True).collect()
            assert_frame_equal(found, expected)
            assert_frame_equal(pipelines.part_by_routes(expected).collect(), expected)


@pytest.mark.slow
@given(routed_steps())
@settings(max_examples=examples(25), deadline=None)
def test_layouts_agree_whatever_part_of_a_trajectory_has_routes(rows):
    with tempfile.TemporaryDirectory() as folder:
        dataset = write_routed(Path(folder) / "ds", rows)
        _, logprobs, update, _ = updates_of(dataset, "step")
        for layout in ("merge", "tree"):
            _, found, other, _ = updates_of(dataset, layout)
            assert (found - logprobs).abs().max() < 1e-5
            check_same(other, update)


def test_a_token_that_rows_share_is_forwarded_once_for_each_routing(tmp_path):
    alike, apart = (
        updates_of(write_routed(tmp_path / str(other), routed_rows(other)), "tree")[-1]
        for other in ((), (0,))
    )
    assert apart == alike + 4  # token 4 of the prompt, and the first step's three that follow it


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("model"))
    tiny_moe().save_pretrained(path)
    return path


def run(dataset, model, out, **settings):
    how = {"learning_rate": 1e-3, "groups_per_batch": 1, "groups_per_mini_batch": 1} | settings
    trainer.train(train_config(dataset=dataset, model=model, out=str(out), **how))
    return metrics_of(out)


def beyond(rows):
    rows[2][ROUTING][3][1][0] = NUM_EXPERTS
    return rows


def twice(rows):
    rows[2][ROUTING][3][1] = [5, 5]
    return rows


def cut(layers, topk):
    rows = routed_rows()
    for row in rows:
        row[ROUTING] = [[layer[topk] for layer in token[layers]] for token in row[ROUTING]]
    return rows


REFUSED = {
    "layers": (
        cut(slice(2), slice(2)),
        "found 2 layers with 2 experts per token; expected 3 layers",
    ),
    "topk": (cut(slice(3), slice(1)), "found 3 layers with 1 experts per token; expected 3 layers"),
    "experts": (beyond(routed_rows()), "trajectory 'g0_1', row 0: found expert 8; expected 0 to 7"),
    "repeated": (twice(routed_rows()), "row 0: found the same expert twice; expected 2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", REFUSED)
def test_routes_that_are_not_the_models_are_refused(kind, moe, tmp_path):
    rows, message = REFUSED[kind]
    dataset = write_routed(tmp_path / "ds", rows)
    with pytest.raises(RolloutError) as refused:
        run(dataset, moe, tmp_path / "run")
    assert message in str(refused.value)
    assert "batch.replay_routing=false" in str(refused.value.hint)
    assert run(dataset, moe, tmp_path / "ignored", replay_routing=False)


@pytest.mark.slow
def test_a_model_that_cannot_replay_routes_is_refused_by_name_unless_they_are_ignored(
    tmp_path, capfd
):
    dataset = write_routed(tmp_path / "ds", routed_rows())
    model = save_tiny_model(tmp_path / "llama")
    with pytest.raises(
        RolloutError, match=r"cannot replay recorded experts \(rollout_expert_indices\) in llama"
    ) as refused:
        run(dataset, model, tmp_path / "run")
    assert "Mixtral" in str(refused.value)
    assert "--set batch.replay_routing=false" in str(refused.value.hint)
    assert len(run(dataset, model, tmp_path / "ignored", replay_routing=False)) == 2
    assert "are ignored, because replay_routing is false" in capfd.readouterr().err


@pytest.mark.slow
def test_tokens_without_recorded_experts_are_counted(moe, tmp_path, capfd):
    rows = routed_rows()
    rows[0][ROUTING], rows[1][ROUTING] = None, rows[1][ROUTING][:10]
    run(write_routed(tmp_path / "ds", rows), moe, tmp_path / "run")
    expected = "warning: 13 of 92 tokens to forward have no recorded experts"
    assert expected in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["step", "merge", "tree"])
def test_a_run_reproduces_a_sampler_that_routed_differently(layout, moe, tmp_path):
    """The sampler is the model with other choices of experts, at their weights of the model."""
    rows, policy = routed_rows((1,)), load_policy(moe, logprob_chunk_tokens=16)
    for row in rows:
        prompt, response = row["prompt_token_ids"], row["response_ids"]
        batch = batch_of(([(prompt, response, [True] * len(response))], [("a", "a_0")]))
        routes = routes_of([torch.tensor(row[ROUTING], dtype=torch.int16)])
        batch = dataclasses.replace(batch, routes=routes)
        forests = cut_batch(batch, config_of(sequence_layout="step").batch)[0].forests
        row["rollout_logprobs"] = policy_logprobs(run_of(policy), batch, forests).tolist()
        row["temperature"] = 1.0
    dataset = write_routed(tmp_path / "ds", rows, "processed")
    how = {"sequence_layout": layout, "gradient_checkpointing": True, "kl_loss_coef": 0.1}
    first, *_ = run(dataset, moe, tmp_path / "run", **how)
    assert first["rollout_logprobs_abs_diff_mean"] < 1e-5
    free, *_ = run(dataset, moe, tmp_path / "free", replay_routing=False, **how)
    assert free["rollout_logprobs_abs_diff_mean"] > 0.1


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_the_embedded_engine_records_what_its_model_chose(family, tokenizer):
    model = tiny_moe(family, vocab_size=49152)
    prompts, ends = [[5, 9, 3], [7], [2, 2, 8, 11, 30, 4, 4]], (6, 3, 1)

    async def sample():
        async with TransformersEngine(model, tokenizer) as engine:
            calls = (
                engine.sample(prompt, Sampling(max_tokens=end))
                for prompt, end in zip(prompts, ends, strict=True)
            )
            return await asyncio.gather(*calls)

    for sampled in asyncio.run(sample()):
        routes, tokens = sampled.rollout_expert_indices, sampled.prompt_token_ids
        tokens = tokens + sampled.response_ids
        assert routes is not None
        assert routes.dtype == np.int16
        assert np.array_equal(routes, choice_of(model, tokens)[:-1].numpy())
    dense = TransformersEngine(tiny_llama(vocab_size=49152), tokenizer)
    assert asyncio.run(dense.sample([5], Sampling(max_tokens=2))).rollout_expert_indices is None


@pytest.mark.slow
def test_the_loop_replays_what_its_embedded_engine_chose(tokenizer, tmp_path):
    """The engine samples in bfloat16, the trainer forwards in float32: their choices differ."""
    tiny_moe(vocab_size=49152).save_pretrained(tmp_path / "model")
    tokenizer.backend.save_pretrained(tmp_path / "model")
    gaps = {}
    for replays in (True, False):
        folder = tmp_path / str(replays)
        folder.mkdir()
        config = rl_config_of(
            folder,
            str(tmp_path / "model"),
            num_iterations=1,
            generate={
                "environment": f"{HERE}:TwoTurns",
                "dtype": "bfloat16",
                "max_response_tokens": 40,
            },
            train={"replay_routing": replays, "groups_per_mini_batch": 2},
        )
        rl.run(config)
        rows = rollout_io.scan(f"{config.run.out}/rollouts/*").collect()
        lengths = rows["prompt_token_ids"].list.len() + rows["response_ids"].list.len() - 1
        assert rows[ROUTING].list.len().to_list() == lengths.to_list()
        gaps[replays] = [
            line["rollout_logprobs_abs_diff_mean"] for line in lines_of(config.run.out)
        ]
    assert gaps[True][0] < 0.9 * gaps[False][0]
