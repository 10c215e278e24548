"""The loop's configuration, the order of its tasks, and the rules of what may begin and where it goes."""

import itertools
import json
import random
import re
import tomllib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.generation.tasks import Task, endless_tasks
from rollout_io.cli.main import run as command
from schemas.errors import RolloutError
from tests.conftest import ROOT
from tests.helpers.configs import rl_config
from tests.helpers.rl_helpers import config_of
from trainer.batches.forest import RowLimit
from trainer.rl import load_rl_config
from trainer.rl.groups import num_allowed, place
from trainer.rl.learning import check_lengths

TOML = """
[model]
path = "m"
[loop]
tasks = "t.jsonl"
num_iterations = 3
[generate]
environment = "gsm8k"
group_size = 4
[optimizer]
learning_rate = 1e-5
"""


def test_overrides_reach_into_inline_tables(tmp_path):
    text = TOML + 'env_configs = {"m:E" = {url = "u"}}\n[evaluate]\ntasks = "e.jsonl"\n'
    text = text.replace("[optimizer]\n", "").replace("learning_rate = 1e-5\n", "")
    overrides = (
        "generate.env_config.topk=3",
        'generate.env_configs."m:E".deep.x=[1]',
        "evaluate.env_config.url=v",
    )
    config = load(tmp_path, text, *overrides)
    assert config.generation.env_config == {"topk": 3}
    assert config.generation.env_configs == {"m:E": {"url": "u", "deep": {"x": [1]}}}
    (planned,) = config.evaluations(0).values()
    assert planned.env_config == {"url": "v"}


@pytest.mark.parametrize(
    ("text", "place", "hint"),
    [
        (
            TOML + "[batch]\ngroup_per_batch = 4\n",
            "key batch.group_per_batch: ",
            "`batch.groups_per_batch`",
        ),
        (
            TOML + "[evaluate]\ntemprature = 1\n",
            "key evaluate.temprature: ",
            "`evaluate.temperature`",
        ),
        ("gamma = 1.0\n" + TOML, "key gamma: ", "`advantage.gamma`"),
    ],
)
def test_an_unknown_key_of_a_file_is_refused_with_the_file_and_the_table(
    tmp_path, text, place, hint
):
    with pytest.raises(RolloutError) as error:
        load(tmp_path, text)
    assert str(error.value).startswith(f"{tmp_path}/c.toml, {place}unknown key")
    assert hint in error.value.hint


def test_a_record_made_in_python_names_the_table_of_an_unknown_key():
    with pytest.raises(RolloutError, match=r"^\[generate\], key gama: unknown key"):
        rl_config(**OWN, generate={"gama": 1.0})


OWN = {"model": "m", "tasks": "t", "out": "o", "num_iterations": 1}


def test_a_missing_out_is_a_usage_error_unless_the_configuration_has_it(tmp_path, capsys):
    file = tmp_path / "c.toml"
    file.write_text(TOML)
    assert command(["rl", str(file)]) == 2
    said = capsys.readouterr().err
    assert "rollouts rl: missing option --out" in said
    assert "Hint: pass --out RUN" in said
    file.write_text(f'[run]\nout = "{tmp_path}/run"\n{TOML}')
    for options in ([], ["--set", f"run.out={tmp_path}/run"]):
        assert command(["rl", str(file), *options]) == 1
        assert "missing option" not in capsys.readouterr().err


def load(tmp_path, text=TOML, *overrides):
    file = tmp_path / "c.toml"
    file.write_text(text)
    return load_rl_config(file, ["run.out=run", *overrides])


def test_the_page_shows_the_example():
    page = (ROOT / "docs" / "rl.md").read_text()
    lines = page.split("`python examples/addition.py")[0].splitlines()
    shown = "\n".join(line.strip() for line in lines if line.startswith("    "))
    example = (ROOT / "examples" / "addition.toml").read_text()
    assert tomllib.loads(shown) == tomllib.loads(example)


def test_tables_and_dotted_overrides_make_one_configuration(tmp_path):
    overrides = [
        "optimizer.learning_rate=5e-6",
        "evaluate.tasks=1",
        "generate.stop=['a']",
        "run.seed=7",
    ]
    config = load(tmp_path, TOML, *overrides)
    assert config.training.optimizer.learning_rate == 5e-6
    assert config.training.data.group_size == config.generation.group_size == 4
    assert config.training.run.seed == config.generation.seed == 7
    assert config.training.data.dataset == "run/rollouts/*"
    (planned,) = config.evaluations(3).values()
    assert (planned.tasks, planned.out) == ("1", "run/evaluations/iteration_00003")
    assert (planned.group_size, planned.stop) == (1, ("a",))
    served = load(tmp_path, TOML, "generate.engine=vllm", "generate.urls=['http://a']")
    assert served.generation.seed is None
    assert served.generation.engine_args == {}


def test_vllm_in_the_trainers_process_has_the_seed_of_the_run_and_samples_between_updates(tmp_path):
    vllm = ("generate.engine=vllm", "run.seed=7")
    config = load(tmp_path, TOML, *vllm, "generate.engine_args.max_model_len=99")
    assert config.generation.engine_args == {"max_model_len": 99, "seed": 7}
    assert load(tmp_path, TOML, *vllm, "generate.engine_args.seed=3").generation.engine_args == {
        "seed": 3
    }
    with pytest.raises(RolloutError, match="does not sample during updates") as error:
        load(tmp_path, TOML, *vllm, "loop.max_staleness=1")
    assert error.value.where == "[loop] max_staleness"


SETS = """
[evaluate]
every_iterations = 2
group_size = 4
[evaluate.sums]
tasks = "sums.jsonl"
env_config = {url = "u"}
[evaluate.words]
tasks = "words.jsonl"
group_size = 1
"""


def test_every_table_below_evaluate_is_a_set_with_the_keys_of_all_sets(tmp_path):
    overrides = ["evaluate.sums.temperature=0.5", "evaluate.more.tasks=a.b", "evaluate.top_k=3"]
    config = load(tmp_path, TOML + SETS, *overrides)
    planned = config.evaluations(3)
    assert {name: (p.tasks, p.group_size, p.temperature) for name, p in planned.items()} == {
        "sums": ("sums.jsonl", 4, 0.5),
        "words": ("words.jsonl", 1, 0.0),
        "more": ("a.b", 4, 0.0),
    }
    assert planned["sums"].env_config == {"url": "u"}
    assert {p.top_k for p in planned.values()} == {3}
    assert planned["words"].out == "run/evaluations/words/iteration_00003"
    assert [config.is_evaluation_due(version) for version in range(4)] == [True, False, True, True]
    assert config.resolved()["evaluate"]["words"]["tasks"] == "words.jsonl"
    assert load(tmp_path).evaluations(0) == {}


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        (
            "evaluate.sums.group_siz=1",
            "--set evaluate.sums.group_siz=1: unknown key `group_siz`",
            "size",
        ),
        ("evaluate.sums.group_size=0", "[evaluate.sums] group_size: found 0", None),
        ("evaluate.sums.out=a", "[evaluate.sums]: `out` is set by rollouts rl", "run.out"),
        (
            "evaluate.sums.every_iterations=3",
            "[evaluate.sums]: `every_iterations` is set by",
            "[evalu",
        ),
        ("evaluate.more.group_size=2", "Missing key: tasks (a file, in [evaluate.more])", None),
        ("evaluate.a/b.tasks=x", "[evaluate.a/b]", None),
        ("evaluate.every_iterations=0", "every_iterations: found 0", None),
    ],
)
def test_what_a_set_cannot_have_is_refused_with_its_name(tmp_path, override, message, hint):
    with pytest.raises(RolloutError) as error:
        load(tmp_path, TOML + SETS, override)
    assert message in str(error.value)
    assert hint is None or hint in error.value.hint


def test_one_engine_has_one_template_for_the_calls_of_agents(tmp_path):
    agent = ["generate.environment=none", "generate.agent=m:f"]
    other = "evaluate.sums.chat_template=qwen3_acc_thinking"
    with pytest.raises(RolloutError, match=r"\[evaluate.sums\] chat_template") as error:
        load(tmp_path, TOML + SETS, *agent, other)
    assert "[generate]" in error.value.hint
    same = "generate.chat_template=qwen3_acc_thinking"
    assert load(tmp_path, TOML + SETS, *agent, same, other).evaluations(0)


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ("advantge.gamma=1", "`advantge.gamma`", "`advantage.gamma`"),
        ("gamma=1", "--set gamma=1: unknown key `gamma`", "`advantage.gamma`? It belongs in [adv"),
        ("train.gamma=1", "--set train.gamma=1: unknown key `train.gamma`", "`advantage.gamma`"),
        ("loss.eps=1", "--set loss.eps=1: unknown key", "loss."),
        ("temperature=1", "unknown key `temperature`", "`generate.temperature`"),
        ("group_size=4", "unknown key `group_size`", "`generate.group_size`? It belongs in [gen"),
        (
            "optimizer.learning_rat=1",
            "--set optimizer.learning_rat=1: unknown key `learning_rat`",
            "learning_rate",
        ),
        ("generate.group_siz=1", "`group_siz`", "generate.group_size"),
        (
            "advantage.gamma=high",
            '--set advantage.gamma=high: found "high"; expected a number',
            None,
        ),
        ("advantage.gamma=2", r"advantage.gamma: found 2.0", None),
        ("data.group_size=4", "[data]: `group_size` is set by", "set generate.group_size"),
        ("batch.num_epochs=2", "[batch]: `num_epochs` is set by", "num_iterations"),
        ("generate.out=x", "[generate]: `out` is set by", "run.out"),
        ("evaluate.urls=['a']", "[evaluate]: `urls` is set by", "[generate]"),
        ("evaluate.group_size=2", "Missing key: tasks", None),
        ("loop.num_iterations=0", "num_iterations: found 0", None),
        ("loop.max_staleness=-1", "max_staleness: found -1", None),
        ("loop.weight_sync=never", "one of wait, now", None),
        ("model.path=", "Missing key: model", None),
        (
            "advantage.gamma",
            "--set advantage.gamma: an override must have the form key=value",
            None,
        ),
    ],
)
def test_what_the_loop_cannot_take_is_refused_by_name(tmp_path, override, message, hint):
    with pytest.raises(RolloutError) as error:
        load(tmp_path, TOML, override)
    assert message in str(error.value)
    assert hint is None or hint in error.value.hint


def test_a_table_that_is_none_is_refused(tmp_path):
    for name in ("optimizer", "generate"):
        text = TOML.replace("[optimizer]\nlearning_rate = 1e-5", "").replace(
            '[generate]\nenvironment = "gsm8k"\ngroup_size = 4', ""
        )
        with pytest.raises(RolloutError, match="a table"):
            load(tmp_path, f"{name} = 3\n{text}")


SAVED = {
    "plain": {},
    "one evaluation": {"evaluate": {"tasks": "t.jsonl", "every_iterations": 3, "top_k": 5}},
    "sets": {
        "evaluate": {
            "every_iterations": 3,
            "sums": {"tasks": "a.jsonl", "group_size": 2},
            "words": {"tasks": "b.jsonl", "env_config": {"x": [1]}},
        }
    },
    "vllm": {"generate": {"engine": "vllm", "urls": ("http://a:1",), "stop": ("</a>",)}},
    "colocated": {"generate": {"engine": "vllm", "engine_args": {"max_model_len": 99}}},
}


@pytest.mark.parametrize("settings", SAVED.values(), ids=SAVED)
def test_the_saved_configuration_of_a_run_is_read_back_and_may_be_overridden(tmp_path, settings):
    config = config_of(tmp_path, "smollm2", train={"estimator": "rloo"}, **settings)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config.resolved()))
    again = load_rl_config(file, ["loop.num_iterations=99"])
    changed = {"loop": config.resolved()["loop"] | {"num_iterations": 99}}
    assert again.resolved() == config.resolved() | changed


def test_a_harness_saved_without_its_credentials_is_asked_for(tmp_path):
    harness = {"harness": "solve --api-key sk-1", "environment": None}
    config = config_of(tmp_path, "smollm2", generate=harness)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config.resolved()))
    with pytest.raises(RolloutError, match="without its credentials") as error:
        load_rl_config(file)
    assert "--set generate.harness=" in error.value.hint
    override = "generate.harness=solve --api-key sk-1"
    assert load_rl_config(file, [override]).generate["harness"] == "solve --api-key sk-1"


def tasks_named(*names):
    return [Task(instance_id=name, repetition_id=0, prompt=[]) for name in names]


def test_every_pass_has_every_task_once_in_an_order_of_its_own():
    names = [f"t{i}" for i in range(20)]
    drawn = [
        t.instance_id
        for t in itertools.islice(endless_tasks(tasks_named(*names), "shuffled", 3), 60)
    ]
    first, second, third = drawn[:20], drawn[20:40], drawn[40:]
    assert sorted(first) == sorted(names)
    assert sorted(second) == sorted(f"{name}@2" for name in names)
    assert [n.partition("@")[0] for n in second] != first
    assert {n.partition("@")[2] for n in third} == {"3"}
    again = itertools.islice(endless_tasks(tasks_named(*names), "shuffled", 3), 60)
    assert [t.instance_id for t in again] == drawn
    other = itertools.islice(endless_tasks(tasks_named(*names), "shuffled", 4), 20)
    assert [t.instance_id for t in other] != first


def test_listed_tasks_keep_the_order_of_the_file_in_every_pass():
    drawn = itertools.islice(endless_tasks(tasks_named("c", "a", "b"), "listed", 3), 5)
    assert [t.instance_id for t in drawn] == ["c", "a", "b", "c@2", "a@2"]


def test_visits_of_ids_that_end_in_at_and_a_number_stay_apart_and_know_their_task():
    names = ["a", "a@2", "a@3@2", "mail@x"]
    drawn = list(itertools.islice(endless_tasks(tasks_named(*names), "shuffled", 3), 40))
    assert len({t.instance_id for t in drawn}) == 40
    assert Counter(t.task_instance_id for t in drawn) == dict.fromkeys(names, 10)
    assert [t.instance_id for t in drawn if t.task_instance_id == "a"][:3] == ["a", "a@3", "a@4"]


@given(
    size=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    num_iterations=st.integers(1, 7),
    seed=st.integers(0, 1000),
)
def test_whatever_ends_first_no_group_trains_too_late_and_every_iteration_fills(
    size, max_staleness, num_iterations, seed
):
    """The trainer takes an iteration as soon as it is whole; groups end in any order."""
    rng, room, running, iteration = random.Random(seed), [size] * num_iterations, [], 0
    num_begun = 0
    while iteration < num_iterations:
        bound = {"max_staleness": max_staleness, "num_iterations": num_iterations}
        while num_begun < num_allowed(iteration=iteration, size=size, **bound):
            running.append(iteration)
            num_begun += 1
        slowness = rng.choice([0.0, 0.9])
        index = 0 if rng.random() > slowness else len(running) - 1
        begun = running.pop(index if running else 0)
        last = num_iterations - 1
        deadlines = [min(other + max_staleness, last) for other in running]
        found = place(room, deadlines)
        assert found <= min(begun + max_staleness, last)
        room[found] -= 1
        while iteration < num_iterations and room[iteration] == 0:
            iteration += 1
    assert room == [0] * num_iterations
    assert num_begun == size * num_iterations


LIMIT = RowLimit(num_tokens=256, reason="the model's max_position_embeddings", hint="none")


@pytest.mark.parametrize(
    ("most", "context", "max_row_tokens", "message"),
    [
        (250, 256, None, None),
        (251, None, None, "found 251 + 6 tokens; expected at most 256 in total (the model's max_"),
        (251, None, 64, None),
        (
            96,
            100,
            None,
            "found 96 + 6 tokens; expected at most 100 in total (the engine's context)",
        ),
        (96, 100, 64, "the engine's context"),
        (None, 256, None, None),
        (None, None, None, None),
        (
            None,
            300,
            None,
            "found rows of up to 300 tokens (the engine's context); expected at most 256",
        ),
        (None, 300, 64, None),
    ],
)
def test_rows_that_cannot_fit_are_refused_before_any_is_sampled(
    tmp_path, most, context, max_row_tokens, message
):
    sampling = {"max_input_tokens": most}
    config = config_of(tmp_path, "m", generate=sampling, train={"max_row_tokens": max_row_tokens})
    if message is None:
        check_lengths(config, LIMIT, context)
        return
    with pytest.raises(RolloutError, match=re.escape(message)) as caught:
        check_lengths(config, LIMIT, context)
    assert caught.value.rule == "row_too_long"
