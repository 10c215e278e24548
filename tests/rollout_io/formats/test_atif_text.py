"""Trajectories without token ids: `--tokenizer` re-tokenizes their text."""

import json
import shutil

import polars as pl
import pytest

from rollout_io import convert, read, read_log
from rollout_io.conversion.plan import Keywords
from rollout_io.formats.atif_document import UNKNOWN_CONTEXTS
from schemas import check
from schemas.errors import RolloutError
from tests.helpers.harbor_helpers import (
    agent_step,
    atif,
    failure,
    refers,
    refusal,
    write,
    write_trial,
)

pytestmark = pytest.mark.model


@pytest.fixture
def rows(smollm2_dir):
    def read(*paths):
        template = "chatml_tools_thinking"
        choices = Keywords(format="harbor", tokenizer=str(smollm2_dir), chat_template=template)
        table = read_log([str(path) for path in paths], **choices)
        assert check(table).is_empty()
        return pl.DataFrame(pl.from_arrow(table))

    return read


def said(step_id, source, message, **fields):
    return {"step_id": step_id, "source": source, "message": message} | fields


def called(step_id, message, name, **fields):
    call = {"tool_call_id": f"c{step_id}", "function_name": name, "arguments": {"path": "a"}}
    results = [{"source_call_id": f"c{step_id}", "content": "done"}]
    observation = {"observation": {"results": results}}
    return said(step_id, "agent", message, tool_calls=[call], **observation, **fields)


def trained(tokenizer, frame):
    kept = (
        [i for i, m in zip(ids, mask, strict=True) if m]
        for ids, mask in frame.select("response_ids", "loss_mask").iter_rows()
    )
    return [tokenizer.decode(ids) for ids in kept]


@pytest.mark.slow
def test_a_chat_with_tools_becomes_one_row_that_trains_on_what_the_agent_said(
    tmp_path, rows, tokenizer
):
    tools = [{"type": "function", "function": {"name": "rm", "parameters": {}}}]
    steps = [
        said(1, "system", "You delete files."),
        said(2, "user", "Delete a."),
        said(3, "system", "Added workspace context"),
        called(4, "On it.", "rm", reasoning_content="one file"),
        said(5, "agent", "It is gone.", observation={"results": [{"content": "Sure?"}]}),
        said(6, "agent", "Yes."),
    ]
    record = atif(*steps)
    record["agent"]["tool_definitions"] = tools
    found = rows(write(tmp_path / "a.json", record))
    assert len(found) == 1
    assert found["token_source"].to_list() == ["retokenized"]
    assert found["temperature"].to_list() == [pytest.approx(0.7)]
    chat = [m["role"] for m in json.loads(found["messages"][0])]
    assert chat == ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
    assert '"name": "rm"' in tokenizer.decode(found["prompt_token_ids"][0].to_list())
    (text,) = trained(tokenizer, found)
    for part in ("one file", "On it.", "rm", "It is gone.", "Yes."):
        assert part in text
    whole = tokenizer.decode(found["response_ids"][0].to_list())
    assert ("workspace context" in whole, "done" in whole, "Sure?" in whole) == (False, True, True)
    assert ("done" in text, "Sure?" in text) == (False, False)


def test_copied_steps_and_steps_without_a_call_are_not_trained_on(tmp_path, rows, tokenizer):
    first = said(1, "user", "Hello.", is_copied_context=True)
    copied = said(2, "agent", "I was elsewhere.", is_copied_context=True)
    echo = said(3, "agent", "I am a script.", llm_call_count=0)
    steps = [first, copied, echo, said(4, "user", "And now?"), said(5, "agent", "Now I think.")]
    found = rows(write(tmp_path / "a.json", atif(*steps)))
    prompt = tokenizer.decode(found["prompt_token_ids"][0].to_list())
    assert ("elsewhere" in prompt, "a script" in prompt) == (True, True)
    assert trained(tokenizer, found) == ["Now I think.<|im_end|>"]


@pytest.mark.parametrize(
    "marks",
    [
        {"extra": {"context_management": {"type": "compaction"}}},
        {"observation": {"results": [{"subagent_trajectory_ref": [{"session_id": "s"}]}]}},
        {
            "observation": {"results": [{"subagent_trajectory_ref": [{"session_id": "s"}]}]},
            "extra": {"context_management": {"type": "compaction", "boundary": "replace"}},
        },
    ],
)
def test_a_compaction_begins_a_new_context_after_the_first_prompt(tmp_path, rows, tokenizer, marks):
    steps = [
        said(1, "user", "The task."),
        said(2, "agent", "Before."),
        said(3, "system", "Performed context summarization", **marks),
        said(4, "user", "A summary."),
        said(5, "agent", "After."),
    ]
    found = rows(write(tmp_path / "a.json", atif(*steps)))
    assert trained(tokenizer, found) == ["Before.<|im_end|>", "After.<|im_end|>"]
    chats = [[m["content"] for m in json.loads(p)] for p in found["messages"]]
    assert chats == [["The task.", "Before."], ["The task.", "A summary.", "After."]]


def boundary(step_id, kind, text=None, source="system", **fields):
    results = [] if text is None else [{"content": text}]
    marks = {"extra": {"context_management": {"type": "compaction", "boundary": kind}}}
    observation = {"observation": {"results": results}}
    return said(step_id, source, "Context compaction performed", **marks, **observation, **fields)


@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize("source", ["system", "agent"])
def test_after_a_boundary_that_replaces_the_prompt_is_its_observation_and_what_follows(
    tmp_path, rows, source, is_copied
):
    steps = [
        said(1, "system", "The rules.", is_copied_context=is_copied),
        said(2, "user", "The task.", is_copied_context=is_copied),
        said(3, "agent", "Before.", is_copied_context=is_copied),
        boundary(
            4,
            "replace",
            "A summary.",
            source,
            **({"llm_call_count": 0} if source == "agent" else {}),
        ),
        said(5, "user", "And now?"),
        said(6, "agent", "After."),
        boundary(7, "append", "More facts."),
        said(8, "agent", "More."),
        boundary(9, "replace"),
        said(10, "user", "A second summary."),
        said(11, "agent", "At last."),
    ]
    found = rows(write(tmp_path / "a.json", atif(*steps)))
    chats = [[m["content"] for m in json.loads(p)] for p in found["messages"]]
    after = ["A summary.", "And now?", "After.", "More facts.", "More."]
    assert chats[-2:] == [after, ["A second summary.", "At last."]]
    assert chats[:-2] == ([] if is_copied else [["The rules.", "The task.", "Before."]])


@pytest.mark.parametrize("lost", [boundary(3, "truncate"), boundary(3, "replace")])
def test_calls_whose_context_is_not_in_the_log_are_left_out_and_counted(
    tmp_path, smollm2_dir, lost
):
    steps = [
        said(1, "user", "The task."),
        said(2, "agent", "Before."),
        lost,
        said(4, "agent", "In the dark."),
        boundary(5, "replace", "A summary."),
        said(6, "agent", "After."),
    ]
    path = write(tmp_path / "a.json", atif(*steps))
    choices = Keywords(tokenizer=str(smollm2_dir), chat_template="chatml_tools_thinking")
    done = convert([str(path)], tmp_path / "ds", **choices).summary
    messages = read(tmp_path / "ds").column("messages").to_pylist()
    chats = [[m["content"] for m in json.loads(text)] for text in messages]
    assert chats == [["The task.", "Before."], ["A summary.", "After."]]
    assert done.notes == {UNKNOWN_CONTEXTS: 1}
    assert f"{UNKNOWN_CONTEXTS}: 1" in done.text("ds")


def test_sub_agents_and_continuations_are_contexts_of_the_same_run(tmp_path, rows, tokenizer):
    ref = {"trajectory_path": "sub.json"}
    main = [said(1, "user", "Go."), said(2, "agent", "I ask."), refers(3, ref)]
    path = write(
        tmp_path / "trajectory.json", atif(*main, continued_trajectory_ref="trajectory.cont-1.json")
    )
    write(tmp_path / "sub.json", atif(said(1, "user", "Why?"), said(2, "agent", "So."), name="sub"))
    again = said(1, "user", "Go on.", is_copied_context=True)
    write(tmp_path / "trajectory.cont-1.json", atif(again, said(2, "agent", "I finish.")))
    for found in (rows(path), rows(tmp_path)):
        assert found["agent"].to_list() == ["main", "sub", "main"]
        assert found["trajectory_id"].n_unique() == 1
        assert [t.removesuffix("<|im_end|>") for t in trained(tokenizer, found)] == [
            "I ask.",
            "So.",
            "I finish.",
        ]


def test_a_trial_of_text_has_its_reward_and_a_failed_one_no_rows_of_text(
    tmp_path, rows, trial, tokenizer
):
    chat = atif(said(1, "user", "Go."), said(2, "agent", "Gone."))
    for name, details in (("t0", None), ("t1", [])):
        record = trial(name)
        record["agent_result"]["rollout_details"] = details
        record["verifier_result"] = {"rewards": {"reward": 0.5}}
        write_trial(tmp_path, record, chat)
    record = trial("t2") | {"exception_info": failure("SandboxError", "no disk")}
    record["agent_result"]["rollout_details"] = None
    write_trial(tmp_path, record, chat)
    found = rows(tmp_path).sort("repetition_id")
    assert found["reward"].to_list() == [0.5, 0.5, None]
    assert found["stop_reason"].to_list()[:2] == ["complete", "complete"]
    assert trained(tokenizer, found)[:2] == ["Gone.<|im_end|>"] * 2
    assert "SandboxError: no disk; no tokens: the value is null" in found["error"][2]


@pytest.mark.slow
def test_a_trial_with_ids_in_one_of_its_steps_alone_is_refused(tmp_path, trial, smollm2_dir):
    record = trial("t")
    exact = dict(record["agent_result"])
    record["agent_result"] = None
    parts = [("one", exact), ("two", {"rollout_details": None})]
    record["step_results"] = [
        {"step_name": name, "agent_result": result, "verifier_result": None}
        for name, result in parts
    ]
    directory = write_trial(tmp_path, record)
    chat = atif(said(1, "user", "Go."), said(2, "agent", "Gone."))
    write(directory / "steps" / "two" / "agent" / "trajectory.json", chat)
    choices = Keywords(format="harbor", tokenizer=str(smollm2_dir))
    with pytest.raises(Exception, match="no_token_ids") as caught:
        read_log([str(directory)], **choices)
    assert "step_results[1]" in str(caught.value)


def refs_of(step):
    results = (step.get("observation") or {}).get("results") or []
    return [ref for result in results for ref in result.get("subagent_trajectory_ref") or []]


def test_every_real_trajectory_without_ids_is_read_with_a_tokenizer(harness_logs, rows, tmp_path):
    harbor = harness_logs / "harbor"
    paths = [path for path in harbor.rglob("*trajectory*.json") if "golden" in str(path)]
    other = [harbor / "atif_other" / "openagents.login-trace.trajectory.json"]
    counted = {path.name: len(rows(path)) for path in [*paths, *other] if "conte" not in path.name}
    assert counted == {
        "hello-world.trajectory.json": 1,
        "hello-world.trajectory.no_function_calling.json": 1,
        "hello-world-invalid-json.trajectory.json": 1,
        "openagents.login-trace.trajectory.json": 1,
    }
    main, *_, cont = sorted((harbor / "golden").rglob("*linear-history*"), reverse=True)
    with pytest.raises(RolloutError, match="dangling_reference") as caught:
        rows(main)
    assert (caught.value.rule, caught.value.where) == ("dangling_reference", f"{main}, $.steps[4]")
    record = json.loads(main.read_text(encoding="utf-8"))
    for ref in (r for step in record["steps"] for r in refs_of(step)):
        del ref["trajectory_path"]
    shutil.copy(cont, tmp_path / "trajectory.cont-1.json")
    assert len(rows(write(tmp_path / "trajectory.json", record))) == 2


def test_without_a_tokenizer_the_hint_names_both_ways_out(tmp_path):
    chat = atif(said(1, "user", "Go."), agent_step(2, [], []) | {"metrics": None})
    error = refusal(write(tmp_path / "a.json", chat))
    assert error.got == "the only call has no token ids (the first has no metrics)"
    assert error.hint is not None
    assert error.hint.startswith("pass --tokenizer DIR to re-tokenize the text (approximate), or ")
    assert error.hint.endswith(
        "set collect_rollout_details: true for the agent (terminus-2 with vLLM)"
    )


def refused(smollm2_dir, path):
    with pytest.raises(RolloutError) as caught:
        read_log([str(path)], format="harbor", tokenizer=str(smollm2_dir))
    return caught.value


GONE = atif(said(1, "user", "Go."), said(2, "agent", "Gone."))


def test_text_beside_exact_ids_is_refused_wherever_the_ids_are(tmp_path, smollm2_dir):
    exact = atif(agent_step(1, [1, 2], [3]), trajectory_id="s", name="sub")
    main = [said(1, "user", "Go."), said(2, "agent", "I ask.")]
    by_id, by_path = refers(3, {"trajectory_id": "s"}), refers(3, {"trajectory_path": "sub.json"})
    write(tmp_path / "sub.json", exact)
    for record in (
        atif(*main, by_id, subagent_trajectories=[exact]),
        atif(*main, by_path),
        atif(*main, continued_trajectory_ref="sub.json"),
    ):
        path = write(tmp_path / "a.json", record)
        error = refused(smollm2_dir, path)
        assert (error.rule, error.where) == ("no_token_ids", f"{path}, $.steps[1]")
        assert error.got == (
            "this document has no token ids, but other documents of the run do: "
            "the only call has no token ids (the first has no metrics)"
        )


def test_a_missing_file_of_a_sub_agent_is_refused_and_a_missing_name_is_not(
    tmp_path, smollm2_dir, rows
):
    main = [said(1, "user", "Go."), said(2, "agent", "I ask.")]
    path = write(tmp_path / "a.json", atif(*main, refers(3, {"trajectory_path": "sub.json"})))
    error = refused(smollm2_dir, path)
    assert (error.rule, error.where) == ("dangling_reference", f"{path}, $.steps[2]")
    for ref in ({"trajectory_id": "s"}, {"session_id": "s"}):
        assert len(rows(write(path, atif(*main, refers(3, ref))))) == 1


def test_a_step_of_several_calls_is_refused_in_text_too(tmp_path, smollm2_dir):
    steps = [said(1, "user", "Go."), said(2, "agent", "Gone.", llm_call_count=3)]
    path = write(tmp_path / "a.json", atif(*steps))
    error = refused(smollm2_dir, path)
    assert (error.rule, error.where) == ("no_token_ids", f"{path}, $.steps[1]")
    assert "summed over 3 calls" in error.got
    assert len(read_log([str(write(path, GONE))], tokenizer=str(smollm2_dir))) == 1


def test_the_last_context_of_the_main_agent_carries_the_outcome(tmp_path, rows, trial):
    sub = atif(said(1, "user", "Why?"), said(2, "agent", "So."), name="sub", trajectory_id="s")
    steps = [said(1, "user", "Go."), said(2, "agent", "I ask."), refers(3, {"trajectory_id": "s"})]
    chat = atif(*steps, subagent_trajectories=[sub])
    record = trial("t") | {"agent_result": None, "verifier_result": None}
    record["step_results"] = [
        {
            "step_name": name,
            "agent_result": {"rollout_details": None},
            "verifier_result": {"rewards": {"reward": reward}},
        }
        for name, reward in (("one", 0.25), ("two", 0.75))
    ]
    directory = write_trial(tmp_path / "job", record)
    for name in ("one", "two"):
        write(directory / "steps" / name / "agent" / "trajectory.json", chat)
    found = rows(directory)
    assert found["agent"].to_list() == ["sub", "main", "sub", "main"]
    assert found["reward"].to_list() == [0.0, 0.25, 0.0, 0.75]
    assert found["is_last_step"].to_list() == [False, False, False, True]
    assert [metrics is not None for metrics in found["metrics"]] == [False, True, False, True]
    silent = atif(
        *steps, said(4, "user", "And?"), said(5, "agent", ""), subagent_trajectories=[sub]
    )
    for record in (chat, silent):
        assert rows(write(tmp_path / "a.json", record))["agent"].to_list() == ["sub", "main"]


def test_a_main_agent_without_calls_leaves_the_verdict_to_its_sub_agents(tmp_path, rows, tokenizer):
    sub = atif(said(1, "user", "Why?"), said(2, "agent", "So."), name="sub", trajectory_id="s")
    by_id, by_path = refers(2, {"trajectory_id": "s"}), refers(2, {"trajectory_path": "sub.json"})
    go = said(1, "user", "Go.")
    write(tmp_path / "sub.json", sub)
    for record in (
        atif(go, by_id, subagent_trajectories=[sub]),
        atif(go, subagent_trajectories=[sub]),
        atif(go, by_path),
    ):
        path = write(tmp_path / "a.json", record)
        found = rows(path)
        assert (found["agent"].to_list(), trained(tokenizer, found)) == (
            ["sub"],
            ["So.<|im_end|>"],
        )
        error = refusal(path)
        assert error.rule == "no_token_ids"
        assert error.got == "the only call has no token ids (the first has no metrics)"
        assert (error.hint or "").startswith("pass --tokenizer DIR to re-tokenize the text")
