import pyarrow.compute as pc
import pytest

from pipelines.generation.environments import environment_class
from pipelines.generation.generator import Generator
from schemas.checker import validate
from schemas.errors import RolloutError
from tests.generation_helpers import (
    HERE,
    SpyEngine,
    config_of,
    tasks_of,
    trajectories,
)

BROKEN = f"{HERE}:Broken"
NONSENSE = ("none", "no reward", "nan", "huge reward", "text reward", "maybe", "image", "text")


@pytest.mark.parametrize(
    ("extras", "error"),
    [
        ({"how": "raise"}, "env_raised: trajectory 't0_0', step 1: got KeyError: 'no such tool'"),
        ({"how": "exit"}, "env_raised: trajectory 't0_0', step 1: got SystemExit: 3"),
        ({"how": "panic"}, "env_raised: trajectory 't0_0', step 1: got GeneratorExit: no Exc"),
        (
            {"how": "surrogate"},
            "env_raised: trajectory 't0_0', step 1: got ValueError: \\ud83d",
        ),
        ({"how": "hang"}, "env_timeout: trajectory 't0_0', step 1: got nothing after 0.3 s"),
        ({"how": "raise", "at": "init"}, "env_raised: trajectory 't0_0', init: got KeyError"),
        ({"how": "hang", "at": "init"}, "env_timeout: trajectory 't0_0', init"),
        *[({"how": how}, "env_output: trajectory 't0_0', step 1") for how in NONSENSE],
    ],
)
def test_a_broken_environment_fails_its_trajectory_by_name_and_its_steps_stay(
    engine, tokenizer, extras, error
):
    broken = tasks_of(1, 1, **extras)
    settings = {"environment": BROKEN, "env_timeout_s": 0.3}
    (finished,), table = trajectories(engine, tokenizer, broken, **settings)
    validate(table)
    assert finished.settled.error.startswith(error)
    num_steps = 0 if extras.get("at") == "init" else 2
    assert table.num_rows == max(num_steps, 1)
    assert len(engine.calls) == num_steps
    assert set(table["error"].to_pylist()) == {finished.settled.error}
    assert set(table["reward"].to_pylist()) == {None}


def test_what_cannot_be_looked_at_or_written_down_fails_its_trajectory_alone(engine, tokenizer):
    tasks = [tasks_of(1, 1)[0], tasks_of(2, 1, tells=True)[1]]
    found, table = trajectories(engine, tokenizer, tasks, environment=f"{HERE}:Secretive")
    validate(table)
    errors = [finished.settled.error for finished in found]
    assert errors == ["env_raised: trajectory 't0_0', step 0: got TypeError: no text of it", None]
    assert table["metrics"].to_pylist()[-1] == [("num_\\ud83d", 1.0)]


@pytest.mark.parametrize(
    ("who", "expected"),
    [({"agent": f"{HERE}:meddling"}, 1.0), ({"environment": f"{HERE}:Meddling"}, 0.0)],
)
def test_what_an_attempt_does_to_its_task_no_other_one_sees(engine, tokenizer, who, expected):
    found, _ = trajectories(engine, tokenizer, tasks_of(1, 3, items=[]), **who)
    assert [finished.settled.steps[-1].reward for finished in found] == [expected] * 3


def test_the_others_of_its_group_go_on(engine, tokenizer):
    tasks = tasks_of(1, 3)
    tasks[1] = tasks_of(1, 3, how="raise")[1]
    _, table = trajectories(engine, tokenizer, tasks, environment=BROKEN)
    validate(table)
    failed = table.filter(pc.is_valid(table["error"]))
    assert set(failed["trajectory_id"].to_pylist()) == {"t0_1"}
    assert table.filter(pc.is_null(table["error"]))["reward"].to_pylist() == [0.25, 0.5, 0.75] * 2


@pytest.mark.parametrize("how", ["raise", "hang"])
def test_an_environment_that_does_not_close_costs_a_warning_alone(engine, tokenizer, how):
    tasks = tasks_of(1, 1, at="close", how=how)
    settings = {"environment": BROKEN, "env_timeout_s": 0.3}
    (finished,), _ = trajectories(engine, tokenizer, tasks, **settings)
    assert finished.settled.error is None
    assert finished.settled.steps[-1].reward == 0.75
    assert "close" in finished.warnings[0]


@pytest.mark.parametrize(
    ("how", "error", "num_steps"),
    [
        ("raise", "agent_raised: trajectory 't0_0': got OSError: no sandbox", 1),
        ("exit", "agent_raised: trajectory 't0_0': got RuntimeError: SystemExit: 3", 1),
        ("huge", "agent_reward: trajectory 't0_0': got 1000", 1),
        ("hang", "agent_timeout: trajectory 't0_0': got nothing after 1 s", 1),
        ("nonsense", "agent_reward: trajectory 't0_0': got 'good'", 1),
        ("nan", "agent_reward: trajectory 't0_0': got nan", 1),
        ("silent", "agent_calls: trajectory 't0_0': got no call", 0),
    ],
)
def test_a_broken_agent_fails_its_trajectory_by_name_and_its_calls_stay(
    engine, tokenizer, how, error, num_steps
):
    settings = {"agent": f"{HERE}:failing", "agent_timeout_s": 1.0}
    (finished,), table = trajectories(engine, tokenizer, tasks_of(1, 1, how=how), **settings)
    validate(table)
    assert finished.settled.error.startswith(error)
    assert [len(ids) > 0 for ids in table["response_ids"].to_pylist()] == [num_steps == 1]


def test_an_engine_that_died_ends_the_run_whatever_an_agent_makes_of_it(model, tokenizer):
    for settings in ({"agent": f"{HERE}:stubborn"}, {}):
        engine = SpyEngine(model, tokenizer, num_calls=0)
        with pytest.raises(RolloutError, match="engine_down"):
            trajectories(engine, tokenizer, tasks_of(), **settings)


def test_a_request_that_the_engine_refuses_fails_its_trajectory(engine, tokenizer):
    (finished,), _ = trajectories(
        engine, tokenizer, tasks_of(1, 1), sampling_extra={"bad_words": ["a"]}
    )
    assert finished.settled.error.startswith("engine_refused")


@pytest.mark.parametrize("history", ["append", "step_wise"])
def test_a_first_prompt_that_is_too_long_fails_and_a_later_one_ends_the_trajectory(
    engine, tokenizer, history
):
    short, enough = ({"max_input_tokens": n, "history": history} for n in (5, 40))
    (finished,), _ = trajectories(engine, tokenizer, tasks_of(1, 1), **short)
    assert finished.settled.error.startswith("context_length")
    assert engine.calls == []
    (finished,), table = trajectories(engine, tokenizer, tasks_of(1, 1), **enough)
    longest = max(len(ids) for _, ids, _, _ in engine.calls)
    assert longest <= 40
    assert finished.settled.error is None
    assert 1 <= table.num_rows < 3
    assert table["stop_reason"].to_pylist()[-1] == "context_length"
    assert finished.settled.steps[-1].reward == 0.25 * table.num_rows


@pytest.mark.parametrize("rule", ["zero_reward_on_non_stop", "mask_overlong"])
def test_stop_rules_are_about_the_trajectory_as_a_whole(engine, tokenizer, rule):
    finished, _ = trajectories(engine, tokenizer, tasks_of(4, 2), **{rule: True})
    ends = set()
    for one in finished:
        steps = one.settled.steps
        was_cut = steps[-1].stop_reason == "length"
        ends.add(was_cut)
        if rule == "mask_overlong":
            assert {s.trains for s in steps} == {not was_cut}
            assert steps[-1].reward == 0.75
        else:
            rewards = [0.0] * 3 if was_cut else [0.25, 0.5, 0.75]
            assert [s.reward for s in steps] == rewards
    assert ends == {True, False}


@pytest.mark.parametrize(
    ("source", "got"),
    [
        ("class Env(", "SyntaxError"),
        ("import numppy", "ModuleNotFoundError: No module named 'numppy'"),
    ],
)
def test_a_module_that_does_not_import_is_refused_with_its_own_error(
    tmp_path, monkeypatch, source, got
):
    name = f"broken_{len(source)}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RolloutError, match=f"environment: {name}:Env: got {got}") as error:
        environment_class(f"{name}:Env")
    assert error.value.hint == ""


def test_an_environment_without_step_fails_its_trajectory_by_name(engine, tokenizer):
    settings = {"environment": f"{HERE}:Stepless"}
    (finished,), _ = trajectories(engine, tokenizer, tasks_of(1, 1), **settings)
    error = "env_raised: trajectory 't0_0', step 0: got AttributeError: 'Stepless' object has no"
    assert finished.settled.error.startswith(error)


def test_an_unknown_environment_or_agent_is_refused_before_anything_is_sampled(engine, tokenizer):
    for settings, got in (
        ({"environment": "gsm9k"}, "environment: skyrl-gym: got 'gsm9k'"),
        ({"environment": "tests.generation_helpers:Nothing"}, "environment: tests"),
        (
            {"environment": "tests.nowhere:Env"},
            "environment: tests.nowhere:Env: got ModuleNotFound",
        ),
        ({"environment": None}, "environment: task: got no environment"),
    ):
        generator = Generator(engine, tokenizer, config_of(**settings))
        with pytest.raises(RolloutError) as error:
            generator.check(tasks_of())
        assert str(error.value).startswith(got)
    for name, got in (("not_async", "not async"), ("ASK", "a list")):
        with pytest.raises(RolloutError, match=got):
            Generator(engine, tokenizer, config_of(agent=f"{HERE}:{name}"))
