import asyncio
import threading

import pyarrow.compute as pc
import pytest

from pipelines.generation import user_code as waiting
from pipelines.generation.environments import environment_class
from pipelines.generation.generator import Generator
from schemas.checker import validate
from schemas.errors import RolloutError
from tests.helpers.generation_helpers import HERE, SpyEngine, config_of, tasks_of, trajectories

BROKEN = f"{HERE}:Broken"
NONSENSE = ("none", "no reward", "nan", "huge reward", "text reward", "maybe", "image", "text")


def rewards_of(finished):
    return finished.rows["reward"].to_pylist()


@pytest.mark.parametrize(
    ("extras", "error"),
    [
        ({"how": "raise"}, "env_raised: trajectory 't0_0', step 1: KeyError: 'no such tool'"),
        ({"how": "exit"}, "env_raised: trajectory 't0_0', step 1: SystemExit: 3"),
        ({"how": "panic"}, "env_raised: trajectory 't0_0', step 1: GeneratorExit: no Exc"),
        ({"how": "surrogate"}, "env_raised: trajectory 't0_0', step 1: ValueError: \\ud83d"),
        ({"how": "hang"}, "env_timeout: trajectory 't0_0', step 1: no result within 0.3 s"),
        ({"how": "raise", "at": "init"}, "env_raised: trajectory 't0_0', init: KeyError"),
        ({"how": "hang", "at": "init"}, "env_timeout: trajectory 't0_0', init"),
        *[({"how": how}, "env_output: trajectory 't0_0', step 1") for how in NONSENSE],
    ],
)
def test_a_broken_environment_fails_its_trajectory_by_name_and_its_steps_stay(
    engine, tokenizer, extras, error
):
    broken = tasks_of(1, 1, **extras)
    settings = {"environment": BROKEN, "env_timeout_s": 0.3 if extras["how"] == "hang" else 60.0}
    (finished,), table = trajectories(engine, tokenizer, broken, **settings)
    validate(table)
    assert finished.error.startswith(error)
    num_steps = 0 if extras.get("at") == "init" else 2
    assert table.num_rows == max(num_steps, 1)
    assert len(engine.calls) == num_steps
    assert set(table["error"].to_pylist()) == {finished.error}
    assert set(table["reward"].to_pylist()) == {None}


def test_what_cannot_be_looked_at_or_written_down_fails_its_trajectory_alone(engine, tokenizer):
    tasks = [tasks_of(1, 1)[0], tasks_of(2, 1, tells=True)[1]]
    found, table = trajectories(engine, tokenizer, tasks, environment=f"{HERE}:Secretive")
    validate(table)
    errors = [finished.error for finished in found]
    assert errors == ["env_raised: trajectory 't0_0', step 0: TypeError: no text of it", None]
    assert table["metrics"].to_pylist()[-1] == [{"key": "num_\\ud83d", "value": 1.0}]


@pytest.mark.parametrize(
    ("who", "expected"),
    [({"agent": f"{HERE}:meddling"}, 1.0), ({"environment": f"{HERE}:Meddling"}, 0.0)],
)
def test_what_an_attempt_does_to_its_task_no_other_one_sees(engine, tokenizer, who, expected):
    found, _ = trajectories(engine, tokenizer, tasks_of(1, 3, items=[]), **who)
    assert [rewards_of(finished)[-1] for finished in found] == [expected] * 3


def test_the_others_of_its_group_go_on(engine, tokenizer):
    tasks = tasks_of(1, 3)
    tasks[1] = tasks_of(1, 3, how="raise")[1]
    _, table = trajectories(engine, tokenizer, tasks, environment=BROKEN)
    validate(table)
    failed = table.filter(pc.is_valid(table["error"]))
    assert set(failed["trajectory_id"].to_pylist()) == {"t0_1"}
    assert table.filter(pc.is_null(table["error"]))["reward"].to_pylist() == [0.25, 0.5, 0.75] * 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "hang"])
def test_an_environment_that_does_not_close_costs_a_warning_alone(engine, tokenizer, how):
    tasks = tasks_of(1, 1, at="close", how=how)
    settings = {"environment": BROKEN, "env_timeout_s": 2.0 if how == "hang" else 60.0}
    (finished,), _ = trajectories(engine, tokenizer, tasks, **settings)
    assert finished.error is None
    assert rewards_of(finished)[-1] == 0.75
    assert "close" in finished.warnings[0]


@pytest.mark.parametrize(
    ("how", "error", "num_steps"),
    [
        ("raise", "agent_raised: trajectory 't0_0': OSError: no sandbox", 1),
        ("exit", "agent_raised: trajectory 't0_0': RuntimeError: SystemExit: 3", 1),
        ("huge", "agent_reward: trajectory 't0_0': found the reward 1000", 1),
        ("hang", "agent_timeout: trajectory 't0_0': no result within 1 s", 1),
        ("nonsense", "agent_reward: trajectory 't0_0': found the reward 'good'", 1),
        ("nan", "agent_reward: trajectory 't0_0': found the reward nan", 1),
        ("silent", "agent_calls: trajectory 't0_0': the agent made no calls to the model", 0),
    ],
)
def test_a_broken_agent_fails_its_trajectory_by_name_and_its_calls_stay(
    engine, tokenizer, how, error, num_steps
):
    settings = {"agent": f"{HERE}:failing", "agent_timeout_s": 1.0 if how == "hang" else 60.0}
    (finished,), table = trajectories(engine, tokenizer, tasks_of(1, 1, how=how), **settings)
    validate(table)
    assert finished.error.startswith(error)
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
    assert finished.error.startswith("engine_refused")


@pytest.mark.parametrize("history", ["append", "step_wise"])
def test_a_first_prompt_that_is_too_long_fails_and_a_later_one_ends_the_trajectory(
    engine, tokenizer, history
):
    short, enough = ({"max_input_tokens": n, "history": history} for n in (5, 40))
    (finished,), _ = trajectories(engine, tokenizer, tasks_of(1, 1), **short)
    assert finished.error.startswith("context_length")
    assert engine.calls == []
    (finished,), table = trajectories(engine, tokenizer, tasks_of(1, 1), **enough)
    longest = max(len(ids) for _, ids, _, _ in engine.calls)
    assert longest <= 40
    assert finished.error is None
    assert 1 <= table.num_rows < 3
    assert table["stop_reason"].to_pylist()[-1] == "context_length"
    assert rewards_of(finished)[-1] == 0.25 * table.num_rows


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["zero_reward_on_non_stop", "mask_overlong"])
def test_stop_rules_are_about_the_trajectory_as_a_whole(engine, tokenizer, rule):
    finished, _ = trajectories(engine, tokenizer, tasks_of(4, 2), **{rule: True})
    ends = set()
    for one in finished:
        was_cut = one.rows["stop_reason"].to_pylist()[-1] == "length"
        ends.add(was_cut)
        if rule == "mask_overlong":
            assert {any(mask) for mask in one.rows["loss_mask"].to_pylist()} == {not was_cut}
            assert rewards_of(one)[-1] == 0.75
        else:
            rewards = [0.0] * 3 if was_cut else [0.25, 0.5, 0.75]
            assert rewards_of(one) == rewards
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
    with pytest.raises(RolloutError, match=f"{name}:Env: cannot import it: {got}") as error:
        environment_class(f"{name}:Env")
    assert error.value.hint == ""


def test_an_environment_without_step_fails_its_trajectory_by_name(engine, tokenizer):
    settings = {"environment": f"{HERE}:Stepless"}
    (finished,), _ = trajectories(engine, tokenizer, tasks_of(1, 1), **settings)
    error = "env_raised: trajectory 't0_0', step 0: AttributeError: 'Stepless' object has no"
    assert finished.error.startswith(error)


def test_an_unknown_environment_or_agent_is_refused_before_anything_is_sampled(engine, tokenizer):
    for settings, got in (
        ({"environment": "gsm9k"}, "environment: found 'gsm9k'"),
        ({"environment": "tests.helpers.generation_helpers:Nothing"}, "tests"),
        (
            {"environment": "tests.nowhere:Env"},
            "tests.nowhere:Env: cannot import it: ModuleNotFound",
        ),
        ({"environment": None}, "task: no environment is set"),
    ):
        generator = Generator(engine, tokenizer, config_of(**settings))
        with pytest.raises(RolloutError) as error:
            generator.check(tasks_of())
        assert str(error.value).startswith(got)
    for name, got in (("not_async", "not an `async def`"), ("ASK", "a value of type list")):
        with pytest.raises(RolloutError, match=got):
            Generator(engine, tokenizer, config_of(agent=f"{HERE}:{name}"))


def test_code_that_catches_its_cancellation_does_not_keep_a_run_from_its_end(monkeypatch):
    monkeypatch.setattr(waiting, "_GRACE_S", 0.2)
    caught = []

    async def stubborn():
        while True:
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError as error:
                caught.append(error)

    async def main():
        with pytest.raises(RolloutError, match="agent_timeout"):
            await waiting.in_time(stubborn(), 0.1, "agent", "trajectory 'a_0'")
        await asyncio.sleep(0.1)

    run = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    run.start()
    run.join(timeout=30)
    assert not run.is_alive()
    assert caught
