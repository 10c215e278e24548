"""Slips in logs that users write themselves are told: roles, ids of tool calls, labels, groups."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout_io
from rollout_io.cli.main import run
from rollout_io.dataset.checking import mixed_groups
from rollout_io.formats.base import Conversation, Step, Trajectory, noted
from rollout_io.formats.parsing.messages import ORPHANS, ROLES, check_slips
from schemas.errors import RolloutError
from tests.helpers.adapter_helpers import write_lines
from tests.helpers.examples import examples

ANSWER = {"role": "assistant", "content": "6"}
CALL = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}


def asked(text):
    return [{"role": "user", "content": text}, ANSWER]


def converted(tmp_path, smollm2_dir, *records, options=()):
    """The exit code of a conversion; the dataset is `tmp_path / "ds"`."""
    log = write_lines(tmp_path / "log.jsonl", *records)
    given = ["--tokenizer", str(smollm2_dir), "--out", str(tmp_path / "ds"), *options]
    return run(["convert", str(log), *given])


def call_line(session, messages, **more):
    choice = {"index": 0, "token_ids": [38, 2], "logprobs": {"content": [{"logprob": -0.5}] * 2}}
    response = {"prompt_token_ids": [1, 33, len(messages[0]["content"])], "choices": [choice]}
    return {"session": session, "request": {"messages": messages}, "response": response} | more


def checked(messages, *, strict=False, as_call=False):
    step = Conversation(source="log:1", messages=messages)
    if as_call:
        step = Step(
            source="log:1",
            prompt_token_ids=[1],
            response_ids=[2],
            messages=json.dumps(messages),
        )
    with noted() as notes:
        check_slips(Trajectory(steps=[step]), strict=strict)
    return dict(notes)


@pytest.mark.parametrize("as_call", [False, True])
def test_an_unknown_role_is_refused_by_name(as_call):
    with pytest.raises(RolloutError) as info:
        checked([{"role": "usr", "content": "1+5?"}, ANSWER], as_call=as_call)
    error = info.value
    assert (error.rule, error.got) == ("message_role", "role 'usr'")
    assert error.hint == "did you mean 'user'?"
    assert error.where == "log:1, message 0"


@settings(deadline=None, max_examples=examples(50))
@given(st.lists(st.sampled_from(sorted(ROLES))))
def test_every_known_role_passes_in_any_order(roles):
    assert checked([{"role": role, "content": "a"} for role in roles]) == {}


@settings(deadline=None, max_examples=examples(50))
@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abc")), max_size=8))
def test_results_without_an_earlier_call_are_counted_and_with_strict_refused(events):
    messages, known, num_orphans = [], set(), 0
    for is_call, name in events:
        if is_call:
            messages.append({"role": "assistant", "tool_calls": [CALL | {"id": name}]})
            known.add(name)
        else:
            messages.append({"role": "tool", "tool_call_id": name, "content": "x"})
            num_orphans += name not in known
    assert checked(messages) == ({ORPHANS: num_orphans} if num_orphans else {})
    if num_orphans:
        with pytest.raises(RolloutError, match="which no earlier call has"):
            checked(messages, strict=True)


def test_messages_of_a_call_that_are_no_list_are_left_alone():
    for messages in ("text", {"role": "usr"}, [1, None], None):
        assert checked(messages, as_call=True) == {}


def test_an_unknown_role_rejects_its_record_alone(tmp_path, smollm2_dir, capsys):
    wrong = {"messages": [{"role": "usr", "content": "1+5?"}, ANSWER]}
    skip = ("--on-error", "skip")
    right = {"messages": asked("1+5?")}
    assert converted(tmp_path, smollm2_dir, right, wrong, options=skip) == 0
    said = capsys.readouterr().err
    assert "2 records read = 1 written + 1 rejected" in said
    assert "role 'usr'" in said
    assert "did you mean 'user'?" in said


def test_an_orphan_result_is_told_with_its_count(tmp_path, smollm2_dir, capsys):
    orphan = {"role": "tool", "tool_call_id": "gone", "content": "x"}
    record = {"messages": [*asked("ls"), orphan, ANSWER], "id": "a"}
    template = ("--chat-template", "chatml_tools_thinking")
    assert converted(tmp_path, smollm2_dir, record, options=template) == 0
    assert f"{ORPHANS}: 1" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["task_id", "task", "problem_id", "question_id", "instance"])
@pytest.mark.parametrize("wrap", ["messages", "conversations"])
def test_a_label_of_the_task_names_the_group_and_is_kept(name, wrap, tmp_path, smollm2_dir, capsys):
    shown = [{"from": "human", "value": "1+5?"}, {"from": "gpt", "value": "6"}]
    turns = asked("1+5?") if wrap == "messages" else shown
    records = [{wrap: turns, name: label, "id": i} for i, label in enumerate(["s", "t", "s"])]
    assert converted(tmp_path, smollm2_dir, *records) == 0
    assert f"groups: by {name}" in capsys.readouterr().err
    frame = rollout_io.scan(tmp_path / "ds").select("trajectory_id", name).collect()
    assert sorted(frame.rows()) == [("s_0", "s"), ("s_1", "s"), ("t_0", "t")]


def test_a_text_of_several_lines_names_no_group(tmp_path, smollm2_dir, capsys):
    assert converted(tmp_path, smollm2_dir, {"messages": asked("1+5?"), "task": "Add.\n1+5"}) == 0
    assert "groups: inferred" in capsys.readouterr().err


def test_a_label_in_calls_is_kept_as_a_column(tmp_path, smollm2_dir, capsys):
    records = [call_line(f"s/{i}", asked("1+5?")[:1], task_id=7) for i in range(2)]
    assert converted(tmp_path, smollm2_dir, *records) == 0
    assert "`task_id`, kept as a column (groups: by the names of the sessions): 2" in (
        capsys.readouterr().err
    )
    frame = rollout_io.scan(tmp_path / "ds").select("instance_id", "task_id").collect()
    assert frame.rows() == [("s", "7"), ("s", "7")]


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"taskId": 7}, "taskId"),
        ({"example-id": "7"}, "example-id"),
        ({"metadata": {"task_id": "7"}}, "metadata.task_id"),
        ({"extra_info": {"promptId": "7"}}, "extra_info.promptId"),
    ],
)
@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_a_label_elsewhere_is_told_and_can_be_the_group(
    key, more, name, tmp_path, smollm2_dir, capsys
):
    records = [{key: asked(text), "id": text, **more} for text in ("1+5?", "2+5?")]
    assert converted(tmp_path, smollm2_dir, *records) == 0
    told = f"runs with `{name}`, which looks like a task label (move it to the top level as"
    said = " ".join(capsys.readouterr().err.split())
    assert told in said
    assert f"pass --group-by {name}): 2" in said
    (tmp_path / "ds").rename(tmp_path / "before")
    assert converted(tmp_path, smollm2_dir, *records, options=("--group-by", name)) == 0
    assert "looks like a task label" not in capsys.readouterr().err
    names = rollout_io.scan(tmp_path / "ds").select("trajectory_id").collect().to_series()
    assert sorted(names) == ["7_0", "7_1"]


@pytest.mark.parametrize(
    "more",
    [
        {"task_id": "a", "metadata": {"task_id": 7}},
        {"metadata": {"topic": 7, "task_id": True, "problem_id": [7], "taskId": "two\nlines"}},
        {"metadata": 7, "tasks": "7", "id": "a"},
    ],
)
def test_other_values_and_grouped_runs_are_not_told(more, tmp_path, smollm2_dir, capsys):
    assert converted(tmp_path, smollm2_dir, {"messages": asked("1+5?")} | more) == 0
    assert "looks like a task label" not in capsys.readouterr().err


def test_a_label_in_a_message_is_told(tmp_path, smollm2_dir, capsys):
    messages = [message | {"task_id": "shop"} for message in asked("1+5?")]
    assert converted(tmp_path, smollm2_dir, {"messages": messages}) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "].task_id looks like a task label: move it to the top level" in said


def test_a_label_elsewhere_in_calls_is_told(tmp_path, smollm2_dir, capsys):
    records = [
        call_line(f"{name}/0", asked("1+5?")[:1], metadata={"task_id": task})
        for name, task in (("a", "7"), ("b", "b"))
    ]
    assert converted(tmp_path, smollm2_dir, *records) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "(name the sessions TASK/REPETITION): 1" in said


def test_calls_of_text_alone_are_retokenized(tmp_path, smollm2_dir, capsys):
    record = call_line("a/0", asked("1+5?")[:1])
    record["response"] = {"choices": [{"index": 0, "message": ANSWER}]}
    log, out = write_lines(tmp_path / "log.jsonl", record), str(tmp_path / "ds")
    assert run(["convert", str(log), "--out", out]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "no prompt token ids. [no_token_ids]" in said
    assert "pass --tokenizer DIR to re-tokenize the text" in said
    template = ["--chat-template", "chatml_tools_thinking"]
    assert converted(tmp_path, smollm2_dir, record, options=template) == 0
    assert "1 row re-tokenized from text" in capsys.readouterr().err


@pytest.mark.parametrize(("names", "is_told"), [("ab", True), ("aa", False), ("a", False)])
def test_rewarded_groups_of_one_alone_are_told(names, is_told, tmp_path, smollm2_dir, capsys):
    records = [
        {"messages": asked(f"{i}?"), "task_id": name, "reward": 1} for i, name in enumerate(names)
    ]
    assert converted(tmp_path, smollm2_dir, *records) == 0
    assert ("every group has one attempt" in capsys.readouterr().err) == is_told


@pytest.mark.parametrize("kind", ["messages", "calls"])
def test_a_group_with_different_first_prompts_is_told(kind, tmp_path, smollm2_dir, capsys):
    texts = {"a/0": "1+5?", "a/1": "1+5?", "b/0": "two", "b/1": "three", "c/0": "4"}
    if kind == "calls":
        records = [call_line(name, asked(text)[:1]) for name, text in texts.items()]
    else:
        records = [{"messages": asked(t), "instance_id": n[0]} for n, t in texts.items()]
    assert converted(tmp_path, smollm2_dir, *records) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "1 of 3 groups has attempts with different first prompts, such as 'b'" in said
    assert mixed_groups(tmp_path / "ds") == (["b"], 3)
    for command in ("stats", "validate"):
        assert run([command, str(tmp_path / "ds")]) == 0
        again = " ".join(capsys.readouterr().err.split())
        assert "1 of 3 groups has attempts with different first prompts, such as 'b'" in again


def test_groups_with_one_first_prompt_are_not_told(tmp_path, smollm2_dir, capsys):
    records = [{"messages": asked("1+5?"), "instance_id": "a"}] * 2
    assert converted(tmp_path, smollm2_dir, *records) in {0, 1}
    assert "first prompts" not in capsys.readouterr().err
