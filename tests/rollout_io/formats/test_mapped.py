"""Logs of any names: `--map`, and what is suggested for a file of an unknown format."""

import gzip
import json
import shlex

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_io import convert, read, read_log
from rollout_io.cli.main import run
from schemas import check
from schemas.errors import ConfigError, InputError, RolloutError
from tests.helpers.examples import examples

CHAT = {"model": "m", "messages": [{"role": "user", "content": "2+2?"}], "temperature": 1.0}
NAMES = {
    "session": "problem",
    "attempt": "try",
    "request": "call.req",
    "response": "call.resp",
    "reward": "score",
}
TEMPLATE = "chatml_tools_thinking"


def exact(*ids, text="4"):
    message = {"role": "assistant", "content": text}
    values = {"content": [{"logprob": -0.5} for _ in ids]}
    choice = {"index": 0, "message": message, "token_ids": ids, "logprobs": values}
    return {"prompt_token_ids": [1, 2, 3], "choices": [choice | {"finish_reason": "stop"}]}


def said(text):
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def own(problem, attempt, response, **more):
    return {"problem": problem, "try": attempt, "call": {"req": CHAT, "resp": response}} | more


def write(path, *records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def rows(log, **options):
    table = read_log(log, map=options.pop("map", NAMES), **options)
    assert check(table).is_empty()
    return pl.DataFrame(
        pl.from_arrow(table.drop_columns(["metrics"] * ("metrics" in table.column_names)))
    )


def refusal(log, **options):
    with pytest.raises(RolloutError) as caught:
        read_log(log, map=options.pop("map", NAMES), **options)
    return caught.value


def test_records_of_any_names_become_exact_rows_grouped_by_task(tmp_path):
    log = write(
        tmp_path / "own.jsonl",
        own("p-2", 1, exact(7), score=1),
        own("p-2", 0, exact(4, 5), score=False),
        own("p-10", 0, exact(6), score=0.5),
    )
    found = rows(log)
    assert found["trajectory_id"].to_list() == ["p-2_0", "p-2_1", "p-10_0"]
    assert found["response_ids"].to_list() == [[4, 5], [7], [6]]
    assert found["reward"].to_list() == [0.0, 1.0, 0.5]
    assert found["source"].to_list() == [f"{log}:{n}" for n in (2, 1, 3)]
    assert found["temperature"].to_list() == [1.0] * 3


@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(turns=st.lists(st.integers(1, 4), min_size=1, max_size=5), data=st.data())
def test_calls_in_nested_lists_are_the_runs_that_lines_with_one_call_each_are(
    turns, data, tmp_path
):
    ids = st.lists(st.integers(0, 99), min_size=1, max_size=3)
    calls = [[exact(*data.draw(ids)) for _ in range(number)] for number in turns]
    nested = [
        {"id": f"p-{i}", "turns": [{"q": CHAT, "a": r} for r in found], "score": i}
        for i, found in enumerate(calls)
    ]
    flat = [
        {"problem": f"p-{i}", "try": 0, "call": {"req": CHAT, "resp": response}, "n": n}
        | ({"score": i} if n == len(found) - 1 else {})
        for i, found in enumerate(calls)
        for n, response in enumerate(found)
    ]
    names = {"session": "id", "request": "turns[*].q", "response": "turns[*].a", "reward": "score"}
    documents = {name: f"runs[*].{path}" for name, path in names.items()}
    expected = rows(write(tmp_path / "flat.jsonl", *flat)).drop("source", "messages")
    lines = write(tmp_path / "lines.jsonl", *nested)
    (tmp_path / "list.json").write_text(json.dumps(nested, indent=1))
    (tmp_path / "object.json").write_text(json.dumps({"made": "today", "runs": nested}, indent=1))
    assert rows(lines, map=names).drop("source", "messages").equals(expected)
    assert rows(tmp_path / "list.json", map=names).drop("source", "messages").equals(expected)
    assert rows(tmp_path / "object.json", map=documents).drop("source", "messages").equals(expected)


def test_the_rows_of_tables_compressed_files_and_bodies_as_strings_are_read(tmp_path):
    records = [own("p", n, exact(4, n), score=n) for n in range(2)]
    expected = rows(write(tmp_path / "own.jsonl", *records)).drop("source", "messages")
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "own.jsonl").read_bytes()))
    assert rows(packed)["source"].to_list() == [f"{packed}:1", f"{packed}:2"]
    quoted = [r | {"call": {k: json.dumps(v) for k, v in r["call"].items()}} for r in records]
    assert (
        rows(write(tmp_path / "quoted.jsonl", *quoted)).drop("source", "messages").equals(expected)
    )
    pq.write_table(pa.Table.from_pylist(quoted), tmp_path / "own.parquet")
    assert rows(tmp_path / "own.parquet").drop("source", "messages").equals(expected)


ANTHROPIC = {
    "model": "claude",
    "system": "Be short.",
    "messages": [{"role": "user", "content": "List."}],
    "tools": [{"name": "ls", "description": "", "input_schema": {"type": "object"}}],
}
CALLED = {
    "type": "message",
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "t1", "name": "ls", "input": {}}],
}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "a.txt"}
SECOND = ANTHROPIC | {
    "messages": [
        *ANTHROPIC["messages"],
        {"role": "assistant", "content": CALLED["content"]},
        {"role": "user", "content": [RESULT]},
    ]
}
DONE = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "One file."}]}
ITEMS = [
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]}
]
CHUNKS = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "I say "}}]},
    {"choices": [{"index": 0, "delta": {"content": "4"}, "finish_reason": "stop"}]},
]


@pytest.mark.parametrize(
    ("request_body", "response", "text"),
    [
        (CHAT, said("It is 4."), "It is 4."),
        (CHAT["messages"], "It is 4.", "It is 4."),
        (ANTHROPIC, DONE, "One file."),
        ({"model": "m", "instructions": "Add.", "input": "2+2?"}, {"output": ITEMS}, "4"),
        (CHAT, CHUNKS, "I say 4"),
        (CHAT, "".join(f"data: {json.dumps(c)}\n\n" for c in CHUNKS) + "data: [DONE]", "I say 4"),
        ({"prompt": "2+2="}, {"choices": [{"text": "4 or so"}]}, "4 or so"),
    ],
)
def test_bodies_without_ids_of_each_api_are_retokenized(
    request_body, response, text, tmp_path, smollm2_dir
):
    log = write(tmp_path / "own.jsonl", {"in": request_body, "out": response})
    names = {"request": "in", "response": "out"}
    assert refusal(log, map=names).rule == "no_token_ids"
    found = rows(log, map=names, tokenizer=smollm2_dir, chat_template=TEMPLATE)
    assert found["token_source"].to_list() == ["retokenized"]
    assert text in str(found["response_text"][0]) + str(found["messages"][0])


def test_the_calls_of_one_context_are_one_row_with_its_tools(tmp_path, smollm2_dir):
    turns = [{"q": ANTHROPIC, "a": CALLED}, {"q": SECOND, "a": DONE}]
    log = write(tmp_path / "own.jsonl", {"turns": turns, "passed": True})
    names = {"request": "turns[*].q", "response": "turns[*].a", "reward": "passed"}
    found = rows(log, map=names, tokenizer=smollm2_dir, chat_template=TEMPLATE)
    assert (len(found), found["reward"].to_list()) == (1, [1.0])
    roles = [message["role"] for message in json.loads(found["messages"][0])]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]


def test_a_call_without_ids_beside_calls_with_ids_is_refused_at_its_line(tmp_path, smollm2_dir):
    log = write(tmp_path / "own.jsonl", own("p", 0, exact(4)), own("p", 0, said("no")))
    names = {name: path for name, path in NAMES.items() if name != "reward"}
    error = refusal(log, map=names, tokenizer=smollm2_dir)
    assert (error.rule, error.where) == ("no_token_ids", f"{log}:2")


@pytest.mark.parametrize(
    ("names", "path", "near"),
    [
        ({"response": "call.rsp"}, "call.rsp", "call.resp"),
        ({"reward": "reward"}, "reward", None),
        ({"response": "calls[*].resp"}, "calls[*].resp", "call.resp"),
    ],
)
def test_a_path_that_no_record_has_is_refused_with_the_paths_that_exist(
    names, path, near, tmp_path
):
    log = write(tmp_path / "own.jsonl", own("p", 0, exact(4), score=1))
    error = refusal(log, map=NAMES | names)
    assert (error.rule, error.where) == ("mapped_keys", f"{log}:1")
    assert f"`{path}`" in error.got
    assert "problem, try, call.req, call.resp, score" in error.got
    assert near is None or f"did you mean response={near}?" == error.hint


@pytest.mark.parametrize(
    ("names", "got"),
    [
        ({"respons": "a", "response": "b"}, "the field 'respons'"),
        ({"request": "a"}, "no path of the response"),
        ({"request": "a[*].q", "response": "b[*].r"}, "is in another list"),
    ],
)
def test_a_mapping_that_makes_no_sense_is_refused_before_anything_is_read(names, got):
    with pytest.raises(ConfigError) as caught:
        read_log("absent.jsonl", map=names)
    assert (caught.value.where, got in caught.value.got) == ("--map", True)


def test_errors_name_the_keys_of_the_log_and_its_line(tmp_path):
    bad = own("p", 1, exact(4), score="high")
    log = write(tmp_path / "own.jsonl", own("p", 0, exact(4), score=1), bad)
    error = refusal(log)
    assert (error.rule, error.where) == ("record_type", f"{log}:2, $.score")
    nested = [{"q": CHAT, "a": exact(4)}, {"q": CHAT, "a": exact(4) | {"prompt_token_ids": []}}]
    log = write(tmp_path / "nested.jsonl", {"turns": nested})
    error = refusal(log, map={"request": "turns[*].q", "response": "turns[*].a"})
    assert (error.rule, error.where) == ("nonempty_prompt", f"{log}:1, turns[1]")


def test_a_record_that_lacks_a_key_rejects_its_run_alone(tmp_path):
    cut = own("p", 0, exact(5))
    del cut["call"]["resp"]
    log = write(tmp_path / "own.jsonl", own("p", 0, exact(4)), cut, own("p", 1, exact(6), score=1))
    summary = convert(log, tmp_path / "ds", map=NAMES, on_error="skip").summary
    assert (summary.num_written, summary.num_rejected) == (1, 2)
    assert read(tmp_path / "ds").column("trajectory_id").to_pylist() == ["p_1"]
    rejected = [
        json.loads(line) for line in (tmp_path / "ds.rejected.jsonl").read_text().splitlines()
    ]
    assert {line["rule"] for line in rejected} == {"mapped_keys", "incomplete_trajectory"}


def test_what_is_not_mapped_is_counted_and_numbers_and_labels_are_kept(tmp_path, capsys):
    record = own("p", 0, exact(4), score=1, hint="Think of apples.", task_id="sums", speed=2.5)
    log, out = write(tmp_path / "own.jsonl", record), str(tmp_path / "ds")
    names = ",".join(f"{name}={path}" for name, path in NAMES.items())
    assert run(["convert", str(log), "--map", names, "--out", out]) == 0
    assert "neither read nor left out on purpose: hint (1)" in capsys.readouterr().err
    row = read(out).to_pylist()[0]
    assert (row["task_id"], row["metrics"]) == ("sums", [{"key": "speed", "value": 2.5}])


def test_another_reward_is_named_and_chosen_with_reward(tmp_path, capsys):
    line = {"session": "p/0", "request": CHAT, "response": exact(4), "score": 0.5}
    log, out = str(write(tmp_path / "calls.jsonl", line)), str(tmp_path / "ds")
    assert run(["convert", log, "--out", f"{out}0"]) == 0
    assert (
        "the log has metrics (score), none of which is named as the reward"
        in capsys.readouterr().err
    )
    assert run(["convert", log, "--reward", "score", "--out", out]) == 0
    assert read(out).column("reward").to_pylist() == [0.5]


UNKNOWN = [
    (own("p", 0, exact(4), score=1), "with token ids under `call.resp`"),
    ({"req": CHAT, "resp": said("4")}, "OpenAI completions under `resp`"),
    ({"uid": 1, "log": [{"q": ANTHROPIC, "a": DONE}]}, "Anthropic's Messages API under `log[*].a`"),
    (
        {"in": {"model": "m", "input": "2+2?"}, "out": {"object": "response", "output": ITEMS}},
        "`out`",
    ),
    (
        {"data": [{"run_id": "r", "b": {"x": CHAT, "y": json.dumps(exact(4))}}]},
        "with token ids under",
    ),
    ([{"run_id": "r", "x": CHAT, "y": exact(4), "is_correct": True}], "with token ids under `y`"),
    ({"req": CHAT, "resp": "data: " + json.dumps(CHUNKS[1]) + "\n\n"}, "under `resp`"),
    (
        {"ids": {"SessionId": "s"}, "request": {"body": CHAT}, "response": {"body": said("4")}},
        "`response.body`",
    ),
    (
        {"exchange": {"prompt": "2+2=", "reply": {"choices": [{"text": "4"}]}}},
        "under `exchange.reply`",
    ),
    (
        {"runs": [{"task": "a", "trial": 0, "steps": [{"llm": {"in": CHAT, "out": exact(4)}}]}]},
        "steps[*].llm.out",
    ),
    ({"p q": {"messages": CHAT["messages"]}, "res'p": exact(4)}, "with token ids under `res'p`"),
]


@pytest.mark.parametrize(("record", "looks"), UNKNOWN)
@pytest.mark.parametrize("is_document", [False, True])
def test_an_unknown_file_is_told_what_it_looks_like_and_the_mapping_converts_as_pasted(
    record,
    looks,
    is_document,
    tmp_path,
    smollm2_dir,
    capsys,
):
    log = tmp_path / "own.json"
    log.write_text(json.dumps(record, indent=1 if is_document else None))
    assert run(["convert", str(log), "--out", str(tmp_path / "no")]) == 1
    error, hint, *_ = capsys.readouterr().err.splitlines()
    assert looks in error
    assert error.endswith("[known_format]")
    pasted = shlex.split(hint.removeprefix("Hint: pass "))
    options = ["--tokenizer", str(smollm2_dir), "--chat-template", TEMPLATE]
    options = [] if "with token ids" in error else options
    assert run(["convert", str(log), *pasted, *options, "--out", str(tmp_path / "ds")]) == 0
    assert read(tmp_path / "ds").num_rows == 1


def test_keys_that_later_records_have_are_in_the_mapping_that_is_suggested(tmp_path):
    calls = [own("p", 0, exact(4)), own("p", 0, exact(5)) | {"score": 0.5}]
    calls = [call | {"ts": 2.0 - i} for i, call in enumerate(calls)]
    log = write(tmp_path / "own.jsonl", *calls)
    with pytest.raises(InputError) as caught:
        read_log(log)
    (pasted,) = shlex.split((caught.value.hint or "").removeprefix("pass --map "))
    mapping = dict(field.split("=") for field in pasted.split(","))
    assert (mapping["reward"], mapping["time"]) == ("score", "ts")
    assert read_log(log, map=mapping)["response_ids"].to_pylist() == [[5], [4]]


def test_responses_without_requests_and_ids_are_told_that_no_mapping_reads_them(tmp_path):
    with pytest.raises(InputError, match="without requests or token ids") as caught:
        read_log(write(tmp_path / "own.jsonl", {"custom_id": "a", "response": {"body": said("4")}}))
    assert caught.value.hint == "log the requests too"


def test_calls_in_a_line_that_is_cut_off_reject_the_whole_run(tmp_path):
    log = write(
        tmp_path / "own.jsonl", own("p", 0, exact(4), score=1), own("q", 0, exact(5), score=1)
    )
    log.write_text(log.read_text() + json.dumps(own("p", 0, exact(6)))[:-9])
    summary = convert(log, tmp_path / "ds", map=NAMES, on_error="skip").summary
    assert (summary.num_written, summary.num_rejected) == (1, 2)
    assert read(tmp_path / "ds").column("instance_id").to_pylist() == ["q"]


def test_a_task_without_an_attempt_is_never_suggested_as_the_name_of_a_run(tmp_path):
    records = [{"task": "sum", "q": CHAT, "a": exact(n)} for n in range(1, 4)]
    with pytest.raises(InputError) as caught:
        read_log(write(tmp_path / "own.jsonl", *records))
    assert caught.value.hint == "pass --map request=q,response=a"
    found = rows(tmp_path / "own.jsonl", map={"request": "q", "response": "a"})
    assert found["instance_id"].n_unique() == 1
    assert found["repetition_id"].to_list() == [0, 1, 2]
