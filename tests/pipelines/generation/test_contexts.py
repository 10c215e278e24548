"""Agents that manage their context: what they sampled is what is written and trained, no more."""

from pathlib import Path

import polars as pl
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rollout_io
from pipelines.generation.skyrl import GymGenerator
from pipelines.merging.merge import merge_table
from pipelines.statistics.metrics import rollout_metrics
from rollout_io import TrajectoryID
from rollout_io.cli.main import run as command
from rollout_io.formats.skyrl_generator_output import from_generator_output
from schemas.checker import validate
from tests.helpers import independent_update as independent
from tests.helpers import rl_helpers
from tests.helpers.generation_helpers import ASK, SpyEngine, config_of, generate_with, write_tasks
from tests.helpers.trainer_helpers import step
from trainer import rl


def going_on(client, said, text):
    """The tokens so far, and another message of the user's."""
    turn = f"<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    (ids,) = client.tokenizer.encode([turn], ["test"])
    return said.prompt_token_ids + said.response_ids + ids


def earned(answer):
    return float(sum(answer.response_ids) % 97)


async def summarising(client, task):
    """Sums its context up and begins a new one with that."""
    first = await client.chat(task.prompt)
    second = await client.sample(going_on(client, first, "More."))
    summary = await client.sample(going_on(client, second, "Sum up."))
    so_far = {"role": "user", "content": f"So far: {summary.text}"}
    return earned(await client.chat([*task.prompt, so_far]))


async def dropping(client, task):
    """Forgets what a tool put out once it has answered it."""
    first = await client.chat(task.prompt)
    second = await client.sample(going_on(client, first, "1 2 3 4 5 6 7 8"))
    (kept,) = client.tokenizer.encode(["<|im_end|>\n<|im_start|>assistant\n"], ["test"])
    whole = first.prompt_token_ids + first.response_ids + kept + second.response_ids
    return earned(await client.sample(whole))


async def editing(client, task):
    """Puts other words into its own mouth, and goes on from these."""
    await client.chat(task.prompt)
    edited = {"role": "assistant", "content": "Something else."}
    second = await client.chat([*task.prompt, edited, {"role": "user", "content": "More."}])
    return earned(await client.sample(going_on(client, second, "And?")))


async def delegating(client, task):
    """Has another agent do something of its own, and goes on where it was."""
    first = await client.chat(task.prompt, agent="main")
    helped = await client.chat([{"role": "user", "content": "Help."}], agent="helper")
    await client.sample(going_on(client, helped, "More."), agent="helper")
    return earned(await client.sample(going_on(client, first, "And?"), agent="main"))


AGENTS = {
    "summarising": [[0, 1, 2], [3]],
    "dropping": [[0, 1], [2]],
    "editing": [[0], [1, 2]],
    "delegating": [[1, 2], [0, 3]],
}
"""Steps of each agent that continue each other, by their last one."""
each_agent = pytest.mark.parametrize(("agent", "lineages"), AGENTS.items(), ids=list(AGENTS))


def sampled(engine):
    """What the engine was sent and what it sampled, by session."""
    found = {}
    for session, prompt, _, answer in engine.calls:
        found.setdefault(session, []).append((prompt, answer))
    return found


def merged_by_hand(calls, lineage):
    """Prompt, response and loss mask of a lineage."""
    prompt, whole, mask = calls[lineage[0]][0], list(calls[lineage[0]][0]), list[bool]()
    for index in lineage:
        sent, answer = calls[index]
        assert sent[: len(whole)] == whole
        mask += [False] * (len(sent) - len(whole)) + [True] * len(answer.response_ids)
        whole = sent + answer.response_ids
    return prompt, whole[len(prompt) :], mask


def check_merged(table, engine, lineages):
    """Merged where a prompt continues what was sampled; separate rows where not."""
    calls, rows = sampled(engine), pl.from_arrow(merge_table(table)).rows(named=True)
    expected = [(t, merged_by_hand(c, lineage)) for t, c in calls.items() for lineage in lineages]
    got = [
        (r["trajectory_id"], (r["prompt_token_ids"], r["response_ids"], r["loss_mask"]))
        for r in rows
    ]
    assert sorted(got) == sorted(expected)
    ends = [i + 1 == len(lineages) for _ in calls for i in range(len(lineages))]
    assert [r["is_last_step"] for r in rows] == ends


@each_agent
async def test_the_generator_interface_gives_each_call_of_an_agent_as_a_step(
    engine, tokenizer, agent, lineages
):
    ids = [TrajectoryID(f"u{i // 2}", i % 2) for i in range(4)]
    config = config_of(agent=f"{__name__}:{agent}", max_response_tokens=6)
    async with engine:
        generator = GymGenerator(engine, tokenizer, config)
        output = await generator.generate({"prompts": [ASK] * 4, "trajectory_ids": ids})
    calls = sampled(engine)
    assert sorted(calls) == ["u0_0", "u0_1", "u1_0", "u1_1"]
    rows = [pair for name in sorted(calls) for pair in calls[name]]
    assert output["prompt_token_ids"] == [prompt for prompt, _ in rows]
    assert output["response_ids"] == [answer.response_ids for _, answer in rows]
    assert output["loss_masks"] == [[1] * len(answer.response_ids) for _, answer in rows]
    logprobs = [answer.rollout_logprobs for _, answer in rows]
    assert output["rollout_logprobs"] == [pytest.approx(found) for found in logprobs]
    num_calls = sum(map(len, lineages))
    ends = [i + 1 == num_calls for _ in calls for i in range(num_calls)]
    assert output["is_last_step"] == ends
    for end, rewards, (_, answer) in zip(ends, output["rewards"], rows, strict=True):
        assert rewards == [0.0] * (len(rewards) - 1) + [earned(answer) * end]
    assert output["trajectory_ids"] == [i for i in ids for _ in range(num_calls)]
    table = from_generator_output(output)
    expected = rollout_metrics(table, per="step")
    for name in ("avg_num_tokens", "avg_assistant_tokens"):
        assert output["rollout_metrics"][f"generate/{name}"] == expected[f"generate/{name}"]
    check_merged(table, engine, lineages)


@each_agent
def test_a_dataset_of_an_agent_holds_its_exact_calls(
    tmp_path, engine, tokenizer, monkeypatch, agent, lineages
):
    monkeypatch.setattr("pipelines.generation.run.load_tokenizer", lambda *_: tokenizer)
    name, out = f"{__name__}:{agent}", str(tmp_path / "ds")
    tasks = write_tasks(tmp_path / "tasks.jsonl")
    config = config_of(tasks=tasks, out=out, agent=name, max_response_tokens=6, group_size=2)
    result = generate_with(engine, config)
    assert (result.num_trajectories, result.num_failed) == (4, 0)
    assert command(["validate", out]) == 0
    table = rollout_io.read(out)
    validate(table)
    calls = sampled(engine)
    for row in table.to_pylist():
        prompt, answer = calls[row["trajectory_id"]][row["step_index"]]
        assert (row["prompt_token_ids"], row["response_ids"]) == (prompt, answer.response_ids)
        assert row["token_source"] == "engine"
        assert row["reward"] == (earned(answer) if row["is_last_step"] else 0.0)
    check_merged(table, engine, lineages)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tokenizer):
    """A tiny model with SmolLM2's tokenizer."""
    return rl_helpers.save_model(tmp_path_factory.mktemp("model"), tokenizer)


def steps_of(engine):
    """Rows for the independent run, of the engine's calls alone."""
    rows = []
    for session, calls in sampled(engine).items():
        instance, _, repetition = session.rpartition("_")
        for index, (prompt, answer) in enumerate(calls):
            is_last = index + 1 == len(calls)
            values = {
                "loss_mask": [True] * len(answer.response_ids),
                "rollout_logprobs": answer.rollout_logprobs,
                "temperature": 1.0,
                "reward": earned(answer) * is_last,
                "rewards": None,
                "is_last_step": is_last,
            }
            rows.append(
                step(instance, int(repetition), index, prompt, answer.response_ids, **values)
            )
    return rows


QUICK = {"summarising": "tree", "dropping": "merge", "editing": "step", "delegating": "merge"}


def marks_of(agent, layout):
    if layout != QUICK[agent]:
        return [pytest.mark.nightly]
    return [] if agent == "summarising" else [pytest.mark.slow]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "layout"),
    [
        pytest.param(agent, layout, marks=marks_of(agent, layout))
        for agent in QUICK
        for layout in ("step", "merge", "tree")
    ],
)
def test_the_loop_trains_what_an_agent_sampled_and_nothing_else(
    tmp_path, saved, tokenizer, monkeypatch, agent, layout
):
    for module in ("trainer.rl.loop", "trainer.engine.embedded", "trainer.run.model_checks"):
        monkeypatch.setattr(f"{module}.load_tokenizer", lambda *_, **__: tokenizer)
    training = {"sequence_layout": layout, "groups_per_batch": 1}
    generate = {"agent": f"{__name__}:{agent}", "environment": None}
    settings = {"generate": generate, "train": training, "num_iterations": 1}
    config = rl_helpers.config_of(tmp_path, saved, **settings)
    engines = []

    def opened(sampling):
        engines.append(SpyEngine.load(sampling.model))
        return engines[0]

    result = rl.run(config, open_engine=opened)
    assert result.num_updates == 1
    (line,) = rl_helpers.lines_of(config.run.out)
    num_sampled = sum(len(answer.response_ids) for *_, answer in engines[0].calls)
    assert line["num_trained_tokens"] == num_sampled
    lineages = AGENTS[agent]
    num_rows = len(lineages) if layout == "merge" else sum(map(len, lineages))
    assert line["num_rows"] == 3 * num_rows

    model = AutoModelForCausalLM.from_pretrained(saved)
    usual = {"groups_per_mini_batch": 1, "learning_rate": 1e-3, "failed": "trajectory"}
    chosen = {**usual, **training, "sequence_layout": "merge" if layout == "merge" else "step"}
    expected, faint = independent.run(steps_of(engines[0]), model, model, chosen)
    trained = load_file(Path(result.checkpoint) / "model.safetensors")
    apart = size = torch.zeros(())
    for name, before in model.named_parameters():
        if ".layers." in name:  # of 49,152 tokens nearly all have gradients of rounding's size
            known = ~faint[name]
            apart = apart + (trained[name].double() - expected[name])[known].pow(2).sum()
            size = size + (expected[name] - before.detach().double())[known].pow(2).sum()
    assert float(apart / size) ** 0.5 < 1e-3
