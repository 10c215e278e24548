"""Real harnesses behind a recorder: each call is a row, and their logs join with what was recorded."""

import json
import re
from itertools import pairwise

import pytest

from rollout_io.cli.main import run
from tests.helpers.fake_engine import running, tokens_of
from tests.helpers.recorder_helpers import recorder_process, rows
from tests.helpers.token_engine import TokenEngine
from tests.real_harnesses.__main__ import ASK, SCENARIOS, SHELLS
from tests.real_harnesses.exact_engine import ExactEngine, prompt_of
from tests.real_harnesses.harnesses import PROGRAMS, Endpoint, Home

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        not PROGRAMS.exists(), reason=f"no {PROGRAMS}: run `make .venv-harnesses/.ready`"
    ),
]

COLUMNS = ("trajectory_id", "agent", "prompt_token_ids", "response_ids", "rollout_logprobs")
COLUMNS += ("token_source", "stop_reason", "messages", "response_text")
SENDS_NO_SESSION = {"gemini_cli"}
"""Harnesses whose requests do not say which session they belong to."""
SUMMARIZE = re.compile("Respond with TEXT ONLY|handoff summary")
LOGS = {"claude_code": ".claude/projects", "codex": ".codex/sessions"}


def recorded(harness, scenario, path):
    """Run a scenario through a recorder; the engine, and the rows."""
    app = ExactEngine()
    with (
        running(app) as engine,
        recorder_process(path / "ds", "--upstream", engine, "--end-open") as (_, url),
    ):
        named = "/s/task/0" if harness in SENDS_NO_SESSION else ""
        SCENARIOS[harness][scenario](harness, Home(path / "home", Endpoint(url + named)))
    assert run(["validate", str(path / "ds")]) == 0
    return app, rows(path / "ds", *COLUMNS)


def check(app, found):
    """Each answer of the engine is one row, with its ids, log-probabilities and text."""
    answers = {}
    for request, made in app.answers:
        answers[made.said["content"]] = request, made
    assert len(answers) == len(app.answers) == len(found)
    for row in found:
        (text,) = (text for text in answers if text in row["response_text"])
        request, made = answers.pop(text)
        assert row["response_ids"] == tokens_of(made.texts[0])
        expected = [-0.25 - ord(c) / 1000 for c in made.texts[0]]
        assert row["rollout_logprobs"] == pytest.approx(expected, abs=1e-6)
        assert row["prompt_token_ids"] == prompt_of(request["messages"])
        assert (row["token_source"], row["stop_reason"]) == ("engine", made.finish)
        assert made.said["reasoning"] in row["response_text"]


@pytest.mark.parametrize("scenario", ["plain", "parallel"])
@pytest.mark.parametrize("harness", SCENARIOS)
def test_each_call_is_a_row_of_one_session_and_the_tools_ran(harness, scenario, tmp_path):
    app, found = recorded(harness, scenario, tmp_path)
    check(app, found)
    assert len({row["trajectory_id"] for row in found}) == 1
    assert {row.get("agent") for row in found} == {None}
    results = [m for m in app.answers[-1][0]["messages"] if m["role"] == "tool"]
    said = json.dumps([message["content"] for message in results])
    for word in {"plain": ("one", "two"), "parallel": ("left", "right")}[scenario]:
        assert word in said
    assert len(results) == 2


@pytest.mark.parametrize("harness", ["claude_code", "codex"])
def test_a_resumed_session_is_the_same_session(harness, tmp_path):
    app, found = recorded(harness, "resumed", tmp_path)
    check(app, found)
    assert len({row["trajectory_id"] for row in found}) == 1


def test_sub_agents_of_claude_code_are_agents_of_its_session(tmp_path):
    app, found = recorded("claude_code", "sub_agents", tmp_path)
    check(app, found)
    assert len({row["trajectory_id"] for row in found}) == 1
    agents = [row["agent"] for row in found]
    assert len(set(agents) - {None}) == 2
    assert agents.count(None) >= 3


@pytest.mark.parametrize(
    ("harness", "scenario"),
    [(harness, scenario) for harness in LOGS for scenario in SCENARIOS[harness]],
)
def test_every_answer_of_a_log_joins_with_a_recorded_call(harness, scenario, tmp_path, capsys):
    if scenario == "queued":
        pytest.skip("the test has to know when a tool runs")
    app, found = recorded(harness, scenario, tmp_path)
    check(app, found)
    out, logs = tmp_path / "joined", tmp_path / "home" / LOGS[harness]
    capsys.readouterr()
    arguments = ["--join", str(tmp_path / "ds"), "--out", str(out), "--json"]
    assert run(["convert", str(logs), *arguments]) == 0
    joined = json.loads(capsys.readouterr().out)["joined"]
    assert joined["num_without_call"] == 0
    last = [json.dumps(request["messages"][-1]) for request, _ in app.answers]
    summaries = [text for text in last if SUMMARIZE.search(text)]
    assert bool(summaries) == (scenario in {"compacted", "forked"})
    assert joined["num_without_answer"] == len(summaries)  # no answer of the log
    exact = {(tuple(row["prompt_token_ids"]), tuple(row["response_ids"])) for row in found}
    made = rows(out, *COLUMNS)
    assert len(made) == joined["num_joined"] == len(found) - len(summaries)
    assert {(tuple(r["prompt_token_ids"]), tuple(r["response_ids"])) for r in made} <= exact


@pytest.mark.parametrize("harness", ASK)
def test_what_a_real_harness_sends_back_continues_token_by_token(
    harness, tokenizer, smollm2_dir, tmp_path
):
    name, key = SHELLS[harness]
    lines = [
        f'<think>{word}?</think>I will.<tool_call>{{"name":"{name}", "arguments":{{"{key}":'
        f'"echo {word}",   "description":"x"}}}}</tool_call>'
        for word in ("one", "two")
    ]
    title = ["A title."] if harness == "opencode" else []
    app = TokenEngine(tokenizer, [*title, *lines, "<think>Hm.</think>Done.\n"])
    app.max_model_len = 200_000
    arguments = ("--end-open", "--exact-prefix", str(smollm2_dir))
    with (
        running(app) as engine,
        recorder_process(tmp_path / "ds", "--upstream", engine, *arguments) as (_, url),
    ):
        named = "/s/task/0" if harness in SENDS_NO_SESSION else ""
        ASK[harness](Home(tmp_path / "home", Endpoint(url + named)), "Try it.")
    found = [
        row for row in rows(tmp_path / "ds", *COLUMNS) if "A title." not in row["response_text"]
    ]
    assert len(found) == 3
    for before, after in pairwise(found):
        end = before["prompt_token_ids"] + before["response_ids"]
        assert after["prompt_token_ids"][: len(end)] == end
    assert app.paths.count("/v1/completions") == 2
