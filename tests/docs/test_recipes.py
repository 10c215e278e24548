"""Each recipe runs as it stands, one after the other."""

import re

import polars as pl

import pipelines
from rollout_io import convert
from rollout_io.conversion.plan import Keywords
from tests.conftest import EXAMPLES, ROOT

CODE = re.findall(r"```python\n(.*?)```", (ROOT / "docs/recipes.md").read_text(), re.DOTALL)


def test_every_recipe_answers_about_real_sessions(tmp_path, monkeypatch, smollm2_dir, capsys):
    choices = Keywords(tokenizer=str(smollm2_dir), chat_template="chatml_tools_thinking")
    convert([str(EXAMPLES / "claude_code")], tmp_path / "runs" / "agents", **choices)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    shown = []
    for code in CODE:
        exec(code, names)
        shown.append(capsys.readouterr().out)
    assert len(CODE) == 13
    assert all(shown[1:])
    calls = names["calls"]
    assert isinstance(calls, pl.LazyFrame)
    listed = {name for (name,) in calls.select("name").unique().collect().rows()}
    assert all(name in shown[1] for name in listed)
    answers = names["answers"]
    assert isinstance(answers, pl.LazyFrame)
    assert answers.collect().height > 0
    kept = pipelines.trajectory_returns(names["busy"]).collect()
    assert 0 < kept.height < pipelines.trajectory_returns(names["steps"]).collect().height
