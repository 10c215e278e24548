"""What an evaluation samples by default, and its metrics by set and by data source."""

import json
from itertools import combinations

import polars as pl
import pytest

import rollout_io
from pipelines.generation.tasks import read_tasks
from tests.helpers.rl_helpers import HERE, config_of, lines_of, save_model, write_tasks
from trainer import rl
from trainer.engine.embedded import TransformersEngine
from trainer.reports.run_plot import read_metrics
from trainer.rl.evaluation import notes_of, set_metrics


def test_an_evaluation_is_greedy_unless_told(tmp_path):
    evaluate = {"tasks": "t.jsonl"}
    (planned,) = config_of(tmp_path, "m", evaluate=evaluate).evaluations(0).values()
    told = config_of(tmp_path, "m", evaluate=evaluate | {"temperature": 0.5}).evaluations(0)
    assert planned.temperature == 0.0
    assert [one.temperature for one in told.values()] == [0.5]


def test_several_greedy_samples_of_a_task_are_noted(tmp_path):
    sets = {"sums": {"tasks": "t", "group_size": 4}, "words": {"tasks": "t"}}
    (note,) = notes_of(config_of(tmp_path, "m", evaluate=sets))
    assert "[evaluate.sums] samples each task 4 times at temperature 0" in note


def tasks_of(path, sources):
    """Tasks with these sources."""
    lines = [
        {"prompt": "Say it.", "instance_id": name} | ({"data_source": s} if s else {})
        for name, s in sources.items()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_tasks(path, 1)


def returns_of(**values):
    """Of each task's trajectories."""
    rows = [(name, value) for name, of_task in values.items() for value in of_task]
    return pl.DataFrame(rows, ["instance_id", "return"], orient="row")


def test_metrics_are_by_data_source_and_of_all(tmp_path):
    sources = {"a": "math/hard", "b": "math/hard", "c": "code", "d": None}
    tasks = tasks_of(tmp_path / "tasks.jsonl", sources)
    returns = returns_of(a=[1.0, 0.0], b=[0.0, 0.0], c=[-1.0, 0.5], d=[0.0, 0.0])
    found = set_metrics("", returns, tasks, 2)
    assert found["eval/math_hard/avg_score"] == 0.25
    assert found["eval/math_hard/pass_at_1"] == 0.25
    assert found["eval/math_hard/pass_at_2"] == 0.5
    assert found["eval/code/mean_positive_reward"] == 0.25
    assert found["eval/unknown/pass_at_2"] == 0.0
    assert found["eval/all/pass_at_2"] == 0.5
    assert found["eval/all/avg_score"] == pytest.approx(0.5 / 8)


def test_a_set_has_its_name_and_below_it_the_data_sources_that_its_tasks_name(tmp_path):
    tasks = tasks_of(tmp_path / "tasks.jsonl", {"a": "math/hard", "b": None})
    found = set_metrics("held_out", returns_of(a=[1.0], b=[0.0]), tasks, 1)
    assert {name: value for name, value in found.items() if "avg_score" in name} == {
        "eval/held_out/avg_score": 0.5,
        "eval/held_out/math_hard/avg_score": 1.0,
    }


def test_pass_at_n_counts_the_draws_of_n_attempts_that_hold_a_correct_one(tmp_path):
    tasks = tasks_of(tmp_path / "tasks.jsonl", dict.fromkeys("abc"))
    values = {"a": [1.0, 0.0, 0.0, 1.0], "b": [0.0, 0.5, -1.0, 0.0], "c": [0.0, 1.0]}
    found = set_metrics("", returns_of(**values), tasks, 4)
    for n in range(1, 5):
        draws = [list(combinations(v, n)) for v in values.values() if len(v) >= n]
        passed = [sum(any(x > 0 for x in d) for d in drawn) / len(drawn) for drawn in draws]
        assert found[f"eval/all/pass_at_{n}"] == pytest.approx(sum(passed) / len(passed))
    assert "eval/all/pass_at_5" not in found


@pytest.fixture
def _one_loading(monkeypatch, tokenizer):
    for module in ("trainer.rl.loop", "trainer.engine.embedded", "trainer.run.model_checks"):
        monkeypatch.setattr(f"{module}.load_tokenizer", lambda *_, **__: tokenizer)


@pytest.mark.slow
@pytest.mark.usefixtures("_one_loading")
def test_several_sets_are_datasets_of_their_own_in_one_line_and_are_not_sampled_again(
    tmp_path, tokenizer, capsys
):
    model = save_model(tmp_path / "model", tokenizer)
    sets = {
        "greedy": {"tasks": write_tasks(tmp_path / "a.jsonl", 2)},
        "drawn": {
            "tasks": write_tasks(tmp_path / "b.jsonl", 1, data_source="s"),
            "environment": f"{HERE}:TwoTurns",
            "max_turns": 2,
            "group_size": 3,
            "temperature": 1.0,
        },
    }
    config = config_of(tmp_path, model, num_iterations=1, evaluate={"every_iterations": 1, **sets})
    result = rl.run(config)
    said = capsys.readouterr().err
    assert "evaluation after 1 iteration: return_mean " in said
    assert ", drawn " in said
    assert "greedy samples are alike" not in said
    folder = tmp_path / "run" / "evaluations"
    for name, num_rows, temperature in (("greedy", 2, 0.0), ("drawn", 6, 1.0)):
        for version in (0, 1):
            rows = rollout_io.scan(folder / name / f"iteration_0000{version}").collect()
            assert (len(rows), set(rows["temperature"])) == (num_rows, {temperature})
            assert set(rows["policy_version"]) == {version}
    lines = [x for x in read_metrics(tmp_path / "run") if "evaluation/return_mean" in x]
    assert [line["iteration"] for line in lines] == [0, 1]
    assert lines[-1]["evaluation/num_trajectories"] == 5
    means = {name: lines[-1][f"eval/{name}/avg_score"] for name in ("greedy", "drawn", "drawn/s")}
    assert result.evaluation == pytest.approx((2 * means["greedy"] + 3 * means["drawn"]) / 5)
    assert means["drawn/s"] == means["drawn"]
    rows = rollout_io.scan(folder / "drawn" / "iteration_00001").collect()
    assert rows["reward"].sum() / 3 == pytest.approx(means["drawn"])

    shards = {path: path.read_bytes() for path in folder.rglob("*.parquet")}
    updates = lines_of(config.run.out)
    assert rl.run(config, resume=True).evaluation == result.evaluation
    assert {path: path.read_bytes() for path in folder.rglob("*.parquet")} == shards
    assert lines_of(config.run.out) == updates


class Asked(TransformersEngine):
    """Keeps the prompts that it was sent."""

    prompts: list[str]

    async def sample(self, prompt_token_ids, sampling, *, session=None):
        self.prompts.append(self.tokenizer.decode(prompt_token_ids))
        return await super().sample(prompt_token_ids, sampling, session=session)


@pytest.mark.slow
def test_a_set_has_a_chat_template_of_its_own(tmp_path, tokenizer):
    model = save_model(tmp_path / "model", tokenizer)
    tasks = write_tasks(tmp_path / "a.jsonl", 1)
    template = {"chat_template": "qwen3_acc_thinking"}
    arguments = {"chat_template_kwargs": {"enable_thinking": False}}
    sets = {"quiet": {"tasks": tasks, **template, **arguments}, "plain": {"tasks": tasks}}
    config = config_of(tmp_path, model, num_iterations=1, evaluate=sets)
    engines = []

    def opened(sampling):
        engine = Asked.load(sampling.model)
        engine.prompts = []
        engines.append(engine)
        return engine

    rl.run(config, open_engine=opened)
    ends = [prompt.endswith("<think>\n\n</think>\n\n") for prompt in engines[0].prompts]
    assert (ends[:2], ends[-2:], sum(ends)) == ([True, False], [True, False], 2)
    for version in (0, 1):
        path = f"{config.run.out}/evaluations/quiet/iteration_0000{version}"
        fingerprint = rollout_io.read_metadata(path).chat_template_fingerprint
        assert fingerprint != tokenizer.template_fingerprint
