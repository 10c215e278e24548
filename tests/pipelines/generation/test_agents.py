import asyncio
import copy
import dataclasses
import json
from types import SimpleNamespace

import pytest

import rollout_io
from pipelines.generation.config import with_sampling_params
from pipelines.generation.environments import maker_of
from pipelines.generation.run import generate as generate_dataset
from pipelines.generation.skyrl import GymGenerator, tasks_of
from pipelines.generation.tasks import Task, read_tasks
from pipelines.generation.trajectory import Client
from rollout_io import TrajectoryID, from_generator_output
from rollout_io.retokenize.tokenizer import load_tokenizer
from schemas.checker import validate
from schemas.errors import RolloutError
from tests.helpers import generation_helpers as helpers
from tests.helpers.generation_helpers import ASK, HERE, config_of, trajectories
from tests.helpers.rl_helpers import save_model
from trainer.engine import open_engine


@pytest.mark.slow
def test_every_call_of_an_agent_is_a_step_with_its_exact_tokens(engine, tokenizer):
    tasks = helpers.tasks_of(2, 2)
    _, table = trajectories(engine, tokenizer, tasks, agent=f"{HERE}:curious")
    validate(table)
    assert table["agent"].to_pylist() == [None, "checker"] * 4
    assert table["reward"].to_pylist() == [0.0, 0.5] * 4
    assert table["temperature"].to_pylist() == [1.0, 0.5] * 4
    assert json.loads(table["messages"][1].as_py())[-1] == {"role": "user", "content": "Sure?"}
    calls = {(name, tuple(ids)): sampled for name, ids, _, sampled in engine.calls}
    for row in table.to_pylist():
        sampled = calls[row["trajectory_id"], tuple(row["prompt_token_ids"])]
        assert row["response_ids"] == sampled.response_ids


def test_a_client_takes_no_calls_after_its_agents_end_and_no_unknown_field(engine, tokenizer):
    client = Client(engine, tokenizer, helpers.tasks_of(1, 1)[0], config_of(agent="a:b"))
    with pytest.raises(RolloutError, match="'temprature'"):
        asyncio.run(client.chat(ASK, temprature=1.0))
    client.close()
    with pytest.raises(RolloutError, match="the agent called the model after it had finished"):
        asyncio.run(client.sample([1]))


def gsm8k(question, answer, **fields):
    prompt = [{"role": "user", "content": question}]
    return {"prompt": prompt, "reward_spec": {"ground_truth": answer}, **fields}


@pytest.mark.slow
def test_skyrl_gyms_environments_run_by_name(engine, tokenizer, tmp_path):
    records = [gsm8k("2+2?", "4"), gsm8k("3+3?", "6", env_class="gsm8k_multi_turn")]
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    tasks = read_tasks(str(file), 2)
    _, table = trajectories(engine, tokenizer, tasks, environment="gsm8k", max_turns=2)
    validate(table)
    assert table["trajectory_id"].to_pylist() == ["0_0", "0_1", "1_0", "1_0", "1_1", "1_1"]
    assert table["metrics"][3].as_py() == [{"key": "steps", "value": 2.0}]
    assert "final numeric answer" in table["messages"][3].as_py()
    assert table["source"].to_pylist()[0] == f"{file}:1"


def test_keys_that_skyrl_gyms_environment_has_a_default_for_may_be_left_out():
    config = config_of(environment="search", env_config={"topk": 2}, max_turns=4)
    task = helpers.tasks_of(1, 1, reward_spec={"ground_truth": {"target": ["Oslo"]}})[0]
    environment = maker_of(config)(task)()
    tool = environment.tool_group
    found = (tool.search_url, tool.topk, tool.timeout, tool.log_requests, environment.max_turns)
    assert found == ("http://127.0.0.1:8000/retrieve", 2, 30, False, 4)


def test_tasks_of_a_parquet_file_are_those_of_json_lines(tmp_path):
    import polars as pl

    records = [gsm8k("2+2?", "4"), gsm8k("3+3?", "6")]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, records)))
    pl.DataFrame(records).write_parquet(tmp_path / "t.parquet")
    tasks = [read_tasks(str(tmp_path / name), 2) for name in ("t.jsonl", "t.parquet")]
    found = [[(t.trajectory_id, list(t.prompt), t.extras) for t in some] for some in tasks]
    assert found[0] == found[1]
    assert [t.trajectory_id for t in tasks[0]] == ["0_0", "0_1", "1_0", "1_1"]


def test_a_line_of_tasks_ends_at_its_newline_whatever_else_is_in_it(tmp_path):
    prompts = ["a\u2028b", "c\u0085d", "e"]
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts]
    (tmp_path / "tasks.jsonl").write_text("\r\n".join(lines), encoding="utf-8")
    tasks = read_tasks(str(tmp_path / "tasks.jsonl"), 1)
    assert [task.prompt[0]["content"] for task in tasks] == prompts


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "t.jsonl:2"),
        ("[]", "found list; expected an object"),
        ('{"prompt": []}', "found prompt []"),
        ("{}", "the key `prompt` is missing"),
        ('{"prompt": [{"content": "a"}]}', "without a role"),
        ('{"prompt": "a", "instance_id": 0}', "'0' occurs twice"),
        ('{"prompt": "a", "env_class": 3}', "env_class 3"),
    ],
)
def test_a_bad_task_is_refused_with_its_place(tmp_path, line, message):
    file = tmp_path / "t.jsonl"
    file.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(RolloutError) as error:
        read_tasks(str(file), 1)
    assert message in str(error.value)
    with pytest.raises(RolloutError, match="no such file"):
        read_tasks(str(tmp_path / "none.jsonl"), 1)


def batch(num_prompts=2, group_size=2, **fields):
    n = num_prompts * group_size
    ids = [
        SimpleNamespace(instance_id=f"u{i // group_size}", repetition_id=i % group_size)
        for i in range(n)
    ]
    return {
        "prompts": [ASK] * n,
        "env_classes": [f"{HERE}:Echo"] * n,
        "env_extras": [{"num_turns": 2}] * n,
        "sampling_params": {"max_tokens": 8, "temperature": 1.0, "top_k": -1, "logprobs": 1},
        "trajectory_ids": ids,
        **fields,
    }


def generate(engine, tokenizer, given, **settings):
    async def run():
        async with engine:
            config = config_of(environment=None, max_turns=2, **settings)
            return await GymGenerator(engine, tokenizer, config).generate(given)

    return asyncio.run(run())


@pytest.mark.parametrize("history", ["append", "one_message"])
def test_the_generator_interface_gives_one_row_a_trajectory_with_every_reward(
    engine, tokenizer, history
):
    output = generate(engine, tokenizer, batch(), history=history)
    assert len(output["response_ids"]) == 4
    assert output["is_last_step"] == [True] * 4
    for rewards, mask, logprobs, response in zip(
        *(output[n] for n in ("rewards", "loss_masks", "rollout_logprobs", "response_ids")),
        strict=True,
    ):
        assert len(rewards) == len(mask) == len(logprobs) == len(response)
        assert [x for x in rewards if x] == [0.25, 0.5]
        assert rewards[-1] == 0.5
        assert 0 < sum(mask) < len(mask)
        assert all(x == 0.0 for x, m in zip(logprobs, mask, strict=True) if not m)
    assert output["trajectory_ids"][3] == TrajectoryID("u1", 1)
    assert output["rollout_metrics"]["environment/turns"] == 2.0
    validate(from_generator_output(output))
    assert max(c[2].max_tokens for c in engine.calls) == 8


def test_the_generator_interface_gives_a_row_a_step_in_step_wise_mode(engine, tokenizer):
    output = generate(engine, tokenizer, batch(), history="step_wise")
    assert output["is_last_step"] == [False, True] * 4
    assert output["rewards"] == [0.0, 0.75] * 4
    assert all(all(mask) for mask in output["loss_masks"])


def test_the_generator_interface_makes_placeholders_of_a_failed_group(engine, tokenizer):
    extras = [{"num_turns": 2}] * 3 + [{"how": "raise"}]
    given = batch(env_classes=[f"{HERE}:Broken"] * 4, env_extras=extras)
    output = generate(engine, tokenizer, given)
    assert output["stop_reasons"][2:] == ["error", "error"]
    assert output["response_ids"][2:] == [[0], [0]]
    assert all(sum(r) == 0.75 for r in output["rewards"][:2])


def test_a_trajectory_that_is_no_single_sequence_is_refused_where_one_row_is_asked_for(
    engine, tokenizer
):
    given = batch(env_classes=[f"{HERE}:Cutting"] * 4)
    with pytest.raises(RolloutError, match="one_sequence"):
        generate(engine, tokenizer, given)


def test_a_batch_that_is_not_usable_is_refused_by_the_name_of_its_field():
    for fields, message in (
        ({"prompts": []}, "prompts"),
        ({"env_extras": [{}]}, "env_extras: found 1 entries"),
        ({"trajectory_ids": [{"instance_id": "a", "repetition_id": 0}] * 4}, "'a_0' twice"),
    ):
        with pytest.raises(RolloutError, match=message):
            tasks_of(batch(**fields))
    with pytest.raises(RolloutError, match="n = 2"):
        with_sampling_params(config_of(), {"n": 2})
    assert isinstance(tasks_of({"prompts": ["2+2?"]})[0], Task)


def test_environments_get_their_configuration_as_attributes_and_the_most_turns():
    shared = {"search": {"url": "u"}, "topk": 3}
    make = maker_of(config_of(environment=f"{HERE}:Echo", max_turns=4, env_config=shared))
    made = make(helpers.tasks_of(1, 1, number=7)[0])()
    assert (made.env_config.search.url, made.env_config["topk"]) == ("u", 3)
    assert made.extras == {"number": 7, "max_turns": 4}
    with pytest.raises(AttributeError, match="'top'"):
        _ = made.env_config.top


@pytest.mark.parametrize("history", ["step_wise", "append"])
def test_rollout_metrics_are_per_sequence_of_the_output(engine, tokenizer, history):
    output = generate(engine, tokenizer, batch(), history=history)
    trained = [sum(mask) for mask in output["loss_masks"]]
    metrics = output["rollout_metrics"]
    assert metrics["generate/avg_assistant_tokens"] == pytest.approx(sum(trained) / len(trained))
    assert metrics["generate/max_assistant_tokens"] == max(trained)
    assert metrics["generate/avg_response_length"] == metrics["generate/avg_num_tokens"]


def test_an_environment_has_the_settings_of_its_name_over_those_of_all():
    name = f"{HERE}:Echo"
    own = {name: {"topk": 5}, "another": {"topk": 7}}
    config = config_of(environment=name, env_config={"topk": 3, "url": "u"}, env_configs=own)
    made = maker_of(config)(helpers.tasks_of(1, 1)[0])()
    assert made.env_config == {"topk": 5, "url": "u"}


class Flaky(helpers.Echo):
    """Fails in its first two tries."""

    num_made = 0

    def init(self, prompt):
        type(self).num_made += 1
        if self.num_made <= 2:
            raise OSError("no sandbox")
        return super().init(prompt)


@pytest.mark.parametrize(("max_retries", "fails"), [(0, True), (1, True), (2, False)])
def test_a_failed_trajectory_is_begun_anew_as_often_as_asked(engine, tokenizer, max_retries, fails):
    Flaky.num_made = 0
    given = batch(num_prompts=1, group_size=1, env_classes=[f"{__name__}:Flaky"])
    output = generate(engine, tokenizer, given, max_retries=max_retries)
    assert (output["stop_reasons"] == ["error"]) == fails
    assert Flaky.num_made == max_retries + 1


@pytest.mark.slow
def test_the_calls_of_an_agent_are_rendered_by_the_template_of_the_configuration(
    tmp_path, tokenizer
):
    model = save_model(tmp_path / "model", tokenizer)
    tasks, out = helpers.write_tasks(tmp_path / "t.jsonl", 1), str(tmp_path / "ds")
    named = load_tokenizer(model, "qwen3_acc_thinking")
    settings = {"agent": f"{HERE}:curious", "chat_template": "qwen3_acc_thinking"}
    config = config_of(model=model, tasks=tasks, out=out, max_response_tokens=4, **settings)
    asyncio.run(generate_dataset(config, open_engine))
    for row in rollout_io.read(out).to_pylist():
        text = named.render(json.loads(row["messages"]), generation_prompt=True)
        assert row["prompt_token_ids"] == named.encode([text], ["test"])[0]
        assert text != tokenizer.render(json.loads(row["messages"]), generation_prompt=True)
    assert rollout_io.read_metadata(out).chat_template_fingerprint == named.template_fingerprint
    with pytest.raises(RolloutError, match="history and agent"):
        config_of(agent=f"{HERE}:curious", history="step_wise")


def test_arguments_of_the_chat_template_reach_it_and_its_fingerprint(tokenizer):
    backend = copy.deepcopy(tokenizer.backend)
    backend.chat_template = "{% if enable_thinking is false %}quiet{% else %}loud{% endif %}"
    loud = dataclasses.replace(tokenizer, backend=backend)
    quiet = dataclasses.replace(loud, template_kwargs={"enable_thinking": False})
    assert (loud.render(ASK), quiet.render(ASK)) == ("loud", "quiet")
    assert loud.template_fingerprint != quiet.template_fingerprint


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{}, {"enable_thinking": False}])
def test_arguments_of_the_chat_template_reach_the_prompts_of_agents(model, smollm2_dir, arguments):
    tokenizer = load_tokenizer(smollm2_dir, "qwen3_acc_thinking")
    engine = helpers.SpyEngine(model, tokenizer)
    settings = {"agent": f"{HERE}:curious", "chat_template_kwargs": arguments}
    _, table = trajectories(engine, tokenizer, helpers.tasks_of(1, 1), **settings)
    ends = "<think>\n\n</think>\n\n" if arguments else "<|im_start|>assistant\n"
    for row in table.to_pylist():
        assert tokenizer.decode(row["prompt_token_ids"]).endswith(ends)
        asked = json.loads(row["messages"])
        told = dataclasses.replace(tokenizer, template_kwargs=arguments)
        rendered = told.render(asked, generation_prompt=True)
        assert row["prompt_token_ids"] == told.encode([rendered], ["test"])[0]
