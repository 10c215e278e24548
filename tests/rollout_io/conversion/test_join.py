"""`convert LOGS --join RECORDED`: the harness says who called, the recorded calls have the tokens."""

import json
from itertools import count

import pytest

import rollout_io
from rollout_io.cli.main import run
from schemas.errors import RolloutError
from tests.helpers.conversion_helpers import write
from tests.rollout_io.conversion.test_images import ANTHROPIC, ONE, name_of, stored


class Session:
    """A session that a harness logs and a recorder records."""

    def __init__(self, name):
        self.name, self.log, self.calls = name, [], []
        self._ids, self._uuid = count(1), count()
        self._parents, self._seen = {}, {}

    def say(self, role, agent=None, **message):
        number = next(self._uuid)
        line = {
            "type": role,
            "uuid": f"{self.name}-{number}",
            "parentUuid": self._parents.get(agent),
            "sessionId": self.name,
            "isSidechain": agent is not None,
            "timestamp": f"2026-01-01T00:00:{number:02}Z",
            "message": {"role": role, **message},
        }
        self._parents[agent] = line["uuid"]
        self.log.append(line | ({"agentId": agent} if agent else {}))

    def ask(self, content, agent=None):
        self._seen.setdefault(agent, []).append({"role": "user", "content": content})
        self.say("user", agent, content=content)

    def answer(self, text, *tools, agent=None, thought=None, is_logged=True, is_recorded=True):
        """An answer that is logged, recorded, or both."""
        number = next(self._ids)
        blocks = [{"type": "text", "text": text}] if text else []
        blocks += [
            {"type": "tool_use", "id": f"t{number}", "name": n, "input": a} for n, a in tools
        ]
        if is_logged:
            self.say("assistant", agent, id=f"m{number}", model="m", content=blocks)
        calls = [
            {"id": "x", "type": "function", "function": {"name": n, "arguments": json.dumps(a)}}
            for n, a in tools
        ]
        message = {"role": "assistant", "content": text or None, "reasoning_content": thought}
        choice = {
            "index": 0,
            "token_ids": [number, 2],
            "finish_reason": "stop",
            "logprobs": {"token_logprobs": [-0.5, -0.25 * number]},
            "message": message | ({"tool_calls": calls} if calls else {}),
        }
        self._seen.setdefault(agent, [])
        if is_recorded:
            self.calls.append(
                {
                    "session": f"rec-{self.name}/0",
                    "time": float(number),
                    "request": {"messages": [*self._seen[agent]], "temperature": 0.5},
                    "response": {"prompt_token_ids": [100, number], "choices": [choice]},
                }
            )
        for name, _ in tools:
            result = [{"type": "tool_result", "tool_use_id": f"t{number}", "content": name}]
            self.say("user", agent, content=result)


def made(name="s"):
    """A session with a tool, a sub-agent between two answers, equal answers and a thought."""
    session = Session(name)
    session.ask("List the files.")
    session.answer("I look.", ("ls", {"path": "/"}))
    session.ask("Read them.", agent="a1")
    session.answer("ok", agent="a1")
    session.ask("More.", agent="a1")
    session.answer("ok", agent="a1")
    session.answer("ok", thought="It is all there.")
    session.ask("Again.")
    session.answer("", ("ls", {"path": "/"}))
    session.answer("All  done.\n")
    return session


def saved(folder, *sessions):
    for session in sessions:
        write(folder / "logs" / f"{session.name}.jsonl", *session.log)
    calls = [call for session in sessions for call in session.calls]
    return folder / "logs", write(folder / "r.calls.jsonl", *calls)


def ids(table):
    return [row[0] for row in table["response_ids"].to_pylist()]


def test_a_session_that_was_logged_and_recorded_is_joined_entirely(tmp_path):
    logs, calls = saved(tmp_path, made())
    rewards = write(tmp_path / "w.jsonl", {"session": "s/0", "reward": 0.75})
    done = rollout_io.convert([logs], tmp_path / "ds", join=str(calls), rewards=str(rewards))
    assert done.joined == {
        "num_joined": 6,
        "num_without_call": 0,
        "without_call": [],
        "num_without_answer": 0,
        "without_answer": [],
    }
    table = rollout_io.read(tmp_path / "ds")
    assert ids(table) == [1, 2, 3, 4, 5, 6]
    assert table["prompt_token_ids"].to_pylist() == [[100, i] for i in range(1, 7)]
    assert [row[1] for row in table["rollout_logprobs"].to_pylist()] == [
        -0.25 * i for i in range(1, 7)
    ]
    agents = table["agent"].to_pylist()
    assert agents[1] == agents[2] != agents[0]
    assert [agents[i] for i in (3, 4, 5)] == [agents[0]] * 3
    assert set(table["trajectory_id"].to_pylist()) == {"s_0"}
    assert set(table["token_source"].to_pylist()) == {"engine"}
    assert set(table["temperature"].to_pylist()) == {0.5}
    assert table["reward"].to_pylist() == [0.0] * 5 + [0.75]
    assert rollout_io.check(tmp_path / "ds").is_empty()


def test_a_recorded_dataset_gives_the_same_rows_as_its_calls(tmp_path):
    logs, calls = saved(tmp_path, made())
    rollout_io.convert([calls], tmp_path / "recorded")
    tables = []
    for i, join in enumerate((calls, tmp_path / "recorded")):
        rollout_io.convert([logs], tmp_path / f"ds{i}", join=str(join))
        tables.append(rollout_io.read(tmp_path / f"ds{i}").replace_schema_metadata(None))
    assert tables[0].equals(tables[1])


def test_calls_that_only_one_side_has_are_counted_and_named(tmp_path, capsys):
    session = made()
    session.answer("A title.", is_logged=False)
    session.ask("Bye.")
    session.answer("Not recorded.", is_recorded=False)
    logs, calls = saved(tmp_path, session)
    arguments = ["convert", str(logs), "--join", str(calls), "--out", str(tmp_path / "ds")]
    assert run([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    joined = told["joined"]
    assert (joined["num_joined"], joined["num_without_call"], joined["num_without_answer"]) == (
        *(6, 1, 1),
    )
    assert joined["without_answer"] == ["rec-s_0, step 6"]
    assert "s.jsonl" in joined["without_call"][0]
    assert told["notes"]["answers joined with a recorded call"] == 6
    assert told["notes"]["answers without a recorded call, left out"] == 1
    assert run([*arguments[:-1], str(tmp_path / "again")]) == 0
    text = capsys.readouterr().err
    assert "recorded calls without an answer in the log: 1 (rec-s_0, step 6)" in text
    assert ids(rollout_io.read(tmp_path / "ds")) == [1, 2, 3, 4, 5, 6]


def test_equal_answers_of_several_sessions_stay_in_their_sessions(tmp_path):
    sessions = []
    for name in ("a", "b"):
        session = Session(name)
        for text in ("ok", f"only {name}", "ok"):
            session.ask("Go on.")
            session.answer(text)
        sessions.append(session)
    for number, call in enumerate(sessions[1].calls):
        call["response"]["choices"][0]["token_ids"] = [50 + number, 2]
    logs, calls = saved(tmp_path, *sessions)
    reversed_calls = write(tmp_path / "r2.calls.jsonl", *sessions[1].calls, *sessions[0].calls)
    for i, join in enumerate((calls, reversed_calls)):
        rollout_io.convert([logs], tmp_path / f"ds{i}", join=str(join))
        table = rollout_io.read(tmp_path / f"ds{i}")
        found = dict(zip(table["trajectory_id"].to_pylist(), ids(table), strict=True))
        assert found == {"a_0": 3, "b_0": 52}
        assert sorted(ids(table)) == [1, 2, 3, 50, 51, 52]


def test_a_run_of_which_nothing_was_recorded_is_a_bad_record(tmp_path):
    other = Session("other")
    other.ask("Hello")
    other.answer("Nobody recorded me.", is_recorded=False)
    logs, calls = saved(tmp_path, made(), other)
    with pytest.raises(RolloutError, match=r"none of its 1 answer .*\[join\]"):
        rollout_io.convert([logs], tmp_path / "ds", join=str(calls))
    done = rollout_io.convert([logs], tmp_path / "ds", join=str(calls), on_error="skip")
    assert done.summary.num_trajectories == 1
    assert done.joined["num_without_call"] == 1


def test_what_cannot_be_joined_is_refused_by_name(tmp_path):
    logs, calls = saved(tmp_path, made())
    with pytest.raises(RolloutError, match=r"has token ids itself.*\[join\]"):
        rollout_io.convert([calls], tmp_path / "ds", join=str(calls))
    with pytest.raises(RolloutError):
        rollout_io.convert([logs], tmp_path / "ds", join=str(tmp_path / "absent"))
    rollout_io.convert([calls], tmp_path / "recorded")
    assert run(["merge", str(tmp_path / "recorded"), "--out", str(tmp_path / "m")]) == 0
    table = rollout_io.read(tmp_path / "m")
    if "segments" in table.column_names:
        with pytest.raises(RolloutError, match=r"rows of the dataset are merged.*\[join\]"):
            rollout_io.convert([logs], tmp_path / "ds", join=str(tmp_path / "m"))
    assert not (tmp_path / "ds").exists()


def test_pictures_of_recorded_calls_come_along(tmp_path):
    session = Session("s")
    session.ask([{"type": "text", "text": "See."}, ANTHROPIC])
    session.answer("A cat.")
    logs, calls = saved(tmp_path, session)
    rollout_io.convert([logs], tmp_path / "ds", join=str(calls))
    pictures = rollout_io.read(tmp_path / "ds")["pictures"].to_pylist()
    assert pictures == [[{"sha256": name_of(ONE), "start": None, "length": None}]]
    assert list(stored(tmp_path / "ds").values()) == [ONE]
    assert rollout_io.check(tmp_path / "ds").is_empty()


def test_what_a_harness_writes_differently_is_still_the_same_answer(tmp_path):
    session = Session("s")
    session.ask("Add.")
    session.answer("Sum:", ("add", {"b": 1, "a": [2, "\u00e9"]}))
    session.answer("3")
    first, second = (call["response"]["choices"][0]["message"] for call in session.calls)
    first["tool_calls"][0]["function"]["arguments"] = '{"a": [2.0, "\\u00e9"], "b": 1.0}'
    second["content"] = "<think>\nTwo and one.\n</think>\n\n3"
    said = session.log[-1]["message"]
    said["content"] = [{"type": "thinking", "thinking": "Two and one."}, *said["content"]]
    logs, calls = saved(tmp_path, session)
    rollout_io.convert([logs], tmp_path / "ds", join=str(calls))
    assert ids(rollout_io.read(tmp_path / "ds")) == [1, 2]
