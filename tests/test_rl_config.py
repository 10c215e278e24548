"""The loop's configuration, the order of its tasks, and the rules of what may begin and where it goes."""

import itertools
import random
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.generation.tasks import Task
from schemas.errors import RolloutError
from tests.conftest import ROOT
from trainer.rl import RlConfig, load_rl_config
from trainer.rl.draws import check_names, draw
from trainer.rl.rules import num_allowed, place

TOML = """
model = "m"
tasks = "t.jsonl"
num_iterations = 3
[generate]
environment = "gsm8k"
group_size = 4
[train]
learning_rate = 1e-5
"""


def load(tmp_path, text=TOML, *overrides):
    file = tmp_path / "c.toml"
    file.write_text(text)
    return load_rl_config(file, ["out=run", *overrides])


def test_the_page_shows_the_example():
    page = (ROOT / "docs" / "rl.md").read_text()
    lines = page.split("`python examples/addition.py")[0].splitlines()
    shown = "\n".join(line.strip() for line in lines if line.startswith("    "))
    example = (ROOT / "examples" / "addition.toml").read_text()
    assert tomllib.loads(shown) == tomllib.loads(example)


def test_tables_and_dotted_overrides_make_one_configuration(tmp_path):
    overrides = ["train.learning_rate=5e-6", "evaluate.tasks=1", "generate.stop=['a']", "seed=7"]
    config = load(tmp_path, TOML, *overrides)
    assert config.training.learning_rate == 5e-6
    assert config.training.group_size == config.generation.group_size == 4
    assert config.training.seed == config.generation.seed == 7
    assert config.training.dataset == "run/rollouts/*"
    assert config.evaluation(3).tasks == "1"
    assert config.evaluation(3).out == "run/evaluations/iteration_00003"
    assert (config.evaluation(0).group_size, config.evaluation(0).stop) == (1, ("a",))
    served = load(tmp_path, TOML, "generate.engine=vllm", "generate.urls=['http://a']")
    assert served.generation.seed is None


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ("trian.gamma=1", "`trian.gamma`", "`train`"),
        ("train.learning_rat=1", "--set train.learning_rat=1: got `learning_rat`", "learning_rate"),
        ("generate.group_siz=1", "`group_siz`", "group_size"),
        ("train.gamma=high", '--set train.gamma=high: got "high", expected a number', None),
        ("train.gamma=2", r"[train] gamma: got 2.0", None),
        ("train.group_size=4", "[train]: got `group_size`", "write it in [generate]"),
        ("train.num_epochs=2", "[train]: got `num_epochs`", "num_iterations"),
        ("generate.out=x", "[generate]: got `out`", "top of the file"),
        ("evaluate.urls=['a']", "[evaluate]: got `urls`", "[generate]"),
        ("evaluate.group_size=2", "no `tasks`", None),
        ("num_iterations=0", "num_iterations: got 0", None),
        ("max_staleness=-1", "max_staleness: got -1", None),
        ("weight_sync=never", "one of wait, now", None),
        ("model=", "no `model`", None),
        ("train.gamma", "--set train.gamma: got no `=`", None),
    ],
)
def test_what_the_loop_cannot_take_is_refused_by_name(tmp_path, override, message, hint):
    with pytest.raises(RolloutError) as error:
        load(tmp_path, TOML, override)
    assert message in str(error.value)
    assert hint is None or hint in error.value.hint


def test_a_table_that_is_none_is_refused(tmp_path):
    with pytest.raises(RolloutError, match="a table"):
        load(tmp_path, "train = 3\n" + TOML.replace("[train]\nlearning_rate = 1e-5", ""))


def test_dicts_are_checked_as_files_are():
    own = {"model": "m", "tasks": "t", "out": "o", "num_iterations": 1}
    with pytest.raises(RolloutError, match=r"\[generate\], key group_siz"):
        RlConfig(**own, generate={"group_siz": 1})


def tasks_named(*names):
    return [Task(instance_id=name, repetition_id=0, prompt=[]) for name in names]


def test_every_pass_has_every_task_once_in_an_order_of_its_own():
    names = [f"t{i}" for i in range(20)]
    drawn = [t.instance_id for t in itertools.islice(draw(tasks_named(*names), 3), 60)]
    first, second, third = drawn[:20], drawn[20:40], drawn[40:]
    assert sorted(first) == sorted(names)
    assert sorted(second) == sorted(f"{name}@2" for name in names)
    assert [n.partition("@")[0] for n in second] != first
    assert {n.partition("@")[2] for n in third} == {"3"}
    again = itertools.islice(draw(tasks_named(*names), 3), 60)
    assert [t.instance_id for t in again] == drawn
    other = itertools.islice(draw(tasks_named(*names), 4), 20)
    assert [t.instance_id for t in other] != first


def test_ids_that_a_later_pass_would_give_again_are_refused():
    check_names({"a@b", "mail@2"})
    with pytest.raises(RolloutError, match="'a' and 'a@2'"):
        check_names({"a", "a@2"})


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
