"""NeMo Gym runs without token ids: `--tokenizer` re-tokenizes their text."""

import json

import pytest

import rollout_io
from rollout_io import convert, read_log, read_metadata
from rollout_io.conversion.plan import Keywords
from rollout_io.formats.nemo_gym import UNRELIABLE
from rollout_io.formats.nemo_gym_text import CUMULATIVE, UNSEEN, WITHOUT_IDS
from schemas import check
from schemas.columns import metrics_dict
from schemas.errors import RolloutError
from tests.helpers.source_facts import missing_fact, read_source
from tests.rollout_io.formats.test_nemo_gym import (
    FIELDS,
    answer,
    function_call,
    message,
    run,
    tokens,
    write,
)

pytestmark = pytest.mark.model
TEMPLATE = "chatml_tools_thinking"
EMPTY, NULL = {name: [] for name in FIELDS}, dict.fromkeys(FIELDS)
EXACT = [function_call("f", **tokens([1, 2], [3, 4])), answer("f")]
REAL = {
    "nemo_gym/anyterminal_agent.example_rollouts_hermes.jsonl": 5,
    "nemo_gym/tau2.example_rollouts.jsonl": 5,
    "harbor/nemo_gym_harbor_agent.example_output.jsonl": 3,
}


@pytest.fixture
def choices(smollm2_dir):
    def of(**changes):
        names = {"tokenizer": str(smollm2_dir), "chat_template": TEMPLATE}
        return Keywords(format="nemo_gym", **names | changes)

    return of


@pytest.fixture
def rows(tmp_path, choices):
    def read(*records, **changes):
        table = read_log([write(tmp_path / "a.jsonl", list(records))], **choices(**changes))
        assert check(table).is_empty()
        return table.to_pylist()

    return read


@pytest.fixture
def refused(rows):
    def read(*records, **changes):
        with pytest.raises(RolloutError) as caught:
            rows(*records, **changes)
        return caught.value

    return read


def reasoning(text, **fields):
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]} | fields


def asked(*items, **params):
    """The request of a run."""
    return {"responses_create_params": {"input": list(items)} | params}


def user(text):
    return {"role": "user", "content": text}


def trained(tokenizer, row):
    """The texts of the row's segments."""
    spans = [(s["start"], s["start"] + s["length"]) for s in row["segments"]]
    kept = [i for start, end in spans for i in range(start, end)]
    assert [i for i, trains in enumerate(row["loss_mask"]) if trains] == kept
    return [tokenizer.decode(row["response_ids"][start:end]) for start, end in spans]


LS = {"type": "function", "name": "ls", "parameters": {"type": "object"}, "strict": True}


@pytest.mark.parametrize("fields", [EMPTY, NULL, {}])
def test_a_run_becomes_one_row_with_every_item_that_trains_on_the_output_of_the_model(
    rows, tokenizer, fields
):
    request = asked(
        {"role": "developer", "content": "You list files."},
        message("Hello!"),
        user("What is in a?"),
        instructions="Be brief.",
        tools=[LS],
        temperature=0.5,
        top_p=0.9,
    )
    output = [
        reasoning("Two folders."),
        message("I look.", **fields),
        function_call("ls", arguments='{"path": "a", "n": 1.0}', call_id="c1"),
        function_call("ls"),
        {"type": "function_call_output", "call_id": "c1", "output": "b c"},
        answer("ls"),
        message("Two files.", **fields),
        message("b and c.", **fields),
        user("Sure?"),
        message("Yes.", **fields),
        user("Thanks."),
    ]
    end = {"incomplete_details": {"reason": "max_output_tokens"}}
    agent = {"agent_ref": {"name": "hermes"}, "score": 3}
    (row,) = rows(run(*output, response=end, **request, **agent))
    first, *others = trained(tokenizer, row)
    assert first.startswith("<think>\nTwo folders.\n</think>\n\nI look.\n<tool_call>\n")
    assert '{"name": "ls", "arguments": {"path": "a", "n": 1.0}}' in first
    assert first.count("<tool_call>") == 2
    assert others == ["Two files.\nb and c.<|im_end|>", "Yes.<|im_end|>"]
    prompt = tokenizer.decode(row["prompt_token_ids"])
    assert prompt.endswith("What is in a?<|im_end|>\n<|im_start|>assistant\n")
    assert '"name": "ls"' in prompt
    assert (row["token_source"], row.get("rollout_logprobs")) == ("retokenized", None)
    assert (row["trajectory_id"], row["agent"], row["reward"]) == ("0_0", "hermes", 1.0)
    assert (row["temperature"], row["top_p"]) == (pytest.approx(0.5), pytest.approx(0.9))
    assert row["stop_reason"] == "max_output_tokens"
    assert metrics_dict(row["metrics"]) == {"reward": 1.0, "score": 3.0}
    assert row["source"].endswith("a.jsonl:1")
    chat = [(m["role"][0], m["content"]) for m in json.loads(row["messages"])]
    before = [("s", "Be brief."), ("s", "You list files."), ("a", "Hello!")]
    called = [("u", "What is in a?"), ("a", "I look."), ("t", "b c"), ("t", "7")]
    assert chat[:7] == [*before, *called]
    assert chat[7:] == [("a", "Two files.\nb and c."), ("u", "Sure?"), ("a", "Yes.")]


def test_the_output_begins_a_call_even_if_the_input_ends_with_the_model(rows, tokenizer):
    (row,) = rows(run(message("And c."), **asked(user("Go."), message("b"))))
    prompt = tokenizer.decode(row["prompt_token_ids"])
    assert prompt.endswith("assistant\nb<|im_end|>\n<|im_start|>assistant\n")
    assert trained(tokenizer, row) == ["And c.<|im_end|>"]


def test_an_input_that_is_a_text_is_what_the_user_said_even_if_it_is_empty(rows, tokenizer):
    requests = ({"responses_create_params": {"input": text}} for text in ("Go.", ""))
    prompts = [rows(run(message(), **request))[0]["prompt_token_ids"] for request in requests]
    assert [tokenizer.decode(ids) for ids in prompts] == [
        "<|im_start|>user\nGo.<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n",
    ]


def test_calls_of_one_id_are_all_kept(rows, tokenizer):
    calls = [function_call("f", arguments=json.dumps({"n": n})) for n in (1, 1, 2)]
    (row,) = rows(run(*calls, answer("f")))
    (text,) = trained(tokenizer, row)
    assert text.count('{"name": "f", "arguments": {"n": 1}}') == 2
    assert text.count('{"name": "f", "arguments": {"n": 2}}') == 1


def test_what_the_response_repeats_counts_if_the_request_lacks_it(rows, tokenizer):
    other = LS | {"name": "rm"}
    repeated = {"response": {"tools": [other], "instructions": "Delete."}}
    alone, both = asked(user("Go."), tools=[]), asked(user("Go."), tools=[LS], instructions="List.")
    prompts = [
        tokenizer.decode(row["prompt_token_ids"])
        for request in (alone, both)
        for row in rows(run(message("Yes."), **request, **repeated))
    ]
    found = [[word in text for word in ("Delete.", '"rm"', "List.", '"ls"')] for text in prompts]
    assert found == [[True, True, False, False], [False, False, True, True]]


def test_masked_and_failed_runs_have_no_reward(rows):
    error = {"error": {"code": "server_error", "message": "no answer"}}
    masked, failed = run(message(), mask_sample=True), run(message(), rollout=1, response=error)
    first, second, third = rows(masked, failed, run(message(), rollout=2, mask_sample=False))
    assert metrics_dict(first["metrics"])["mask_sample"] == 1.0
    assert [row["error"] for row in (first, second)] == [f"mask_sample: {UNRELIABLE}", "no answer"]
    assert [row["reward"] for row in (first, second)] == [None, None]
    assert first["response_ids"] == third["response_ids"]
    assert second["response_ids"] == []
    assert any(third["loss_mask"])


def test_the_problem_statement_stands_for_an_input_that_is_not_logged(rows, tokenizer):
    metadata = {"problem_statement": "Mend it.", "instance_dict": "{}"}
    (row,) = rows(run(message("Done."), **asked(metadata=metadata)))
    assert "Mend it." in tokenizer.decode(row["prompt_token_ids"])
    assert "Done." in tokenizer.decode(row["response_ids"])


def test_a_prompt_at_the_beginning_of_the_output_is_the_prompt(rows, tokenizer):
    asks = {"type": "message", "role": "user", "content": "Mend it."}
    (row,) = rows(run(asks, message("Done."), **asked()))
    assert "Mend it." in tokenizer.decode(row["prompt_token_ids"])
    assert "Mend it." not in tokenizer.decode(row["response_ids"])


def test_runs_with_ids_stay_as_they_are_beside_runs_without(rows):
    exact = run(*EXACT, function_call("f", **tokens([1, 2, 3, 4, 5], [6])))
    alone = rows(exact, tokenizer=None, chat_template=None)
    assert rows(exact) == alone
    mixed = rows(run(message("hi", **EMPTY), rollout=1), exact)
    assert [row["token_source"] for row in mixed] == ["engine", "engine", "retokenized"]
    assert [row["response_ids"] for row in mixed[:2]] == [[3, 4], [6]]
    for row, own in zip(mixed, alone, strict=False):
        assert {**row, "source": "", "segments": None} == {**own, "source": "", "segments": None}


@pytest.mark.parametrize(
    ("records", "is_text"),
    [
        ([run(*EXACT)], False),
        ([run(*EXACT), run(message(), rollout=1, response={"error": {"message": "x"}})], False),
        ([run(*EXACT), run(message(**EMPTY), rollout=1)], True),
        ([run(message(**NULL))], True),
    ],
)
def test_the_template_is_recorded_only_if_it_rendered_a_row(tmp_path, choices, records, is_text):
    convert([write(tmp_path / "a.jsonl", records)], tmp_path / "ds", **choices())
    metadata = read_metadata(tmp_path / "ds")
    assert (metadata.chat_template_fingerprint is not None) == is_text
    assert "has_text" not in metadata.made_by[0]
    assert metadata.tokenizer_fingerprint is not None


def test_a_run_with_ids_for_some_calls_is_refused(refused):
    error = refused(run(*EXACT, message(**EMPTY)))
    assert (error.rule, error.got) == (
        "no_token_ids",
        "call 2 of 2 has no token ids: its token fields are empty lists",
    )
    assert error.where.endswith("a.jsonl:1, response.output[2]")
    assert (error.hint or "").startswith("set return_token_id_information: true")


def test_without_a_tokenizer_the_hint_names_both_ways_out(refused):
    error = refused(run(message(**EMPTY)), tokenizer=None, chat_template=None)
    assert error.got == "call 1 of 1 has no token ids: its token fields are empty lists"
    hint = "pass --tokenizer DIR to re-tokenize the text (approximate), or set return_token_id_"
    assert (error.hint or "").startswith(hint)


def test_a_response_without_its_input_is_refused(tmp_path, choices):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(run(user("Go."), message())["response"]))
    with pytest.raises(RolloutError) as caught:
        read_log([path], **choices())
    assert (caught.value.rule, caught.value.where) == ("no_token_ids", f"{path}, output[1]")
    assert (caught.value.hint or "").startswith("set return_token_id_information: true")


SUMMARY = {"type": "summary_text", "text": "in short"}
IMAGE = {"type": "input_image"}
INPUT, OUTPUT = "responses_create_params.input[0]", "response.output[0]"


def test_a_request_without_input_is_refused(refused):
    error = refused(run(message("Yes."), message("No."), **asked()))
    assert (error.rule, error.got) == ("message", "the request has no input")
    assert error.where.endswith("responses_create_params.input")


@pytest.mark.parametrize(
    ("item", "got"),
    [
        ({"type": "web_search_call", "id": "w"}, "an item of type 'web_search_call'"),
        ({"type": "compaction", "encrypted_content": "x"}, "an item of type 'compaction'"),
        ({"type": "item_reference", "id": "i"}, "an item of type 'item_reference'"),
        ({"type": "function_call", "arguments": "{}"}, "the function call has no name"),
        ({"type": "function_call", "name": "f"}, "the function call has no arguments"),
        ({"type": "message", "content": "hm"}, "the message has no role"),
        ({"type": "message", "role": "assistant"}, "the message has no content"),
        ({"type": "function_call_output"}, "the function call's output has no text"),
        ({"type": "reasoning", "id": "r"}, "the reasoning has no text"),
        (reasoning("", encrypted_content="gA=="), "the reasoning is encrypted"),
        (reasoning("hm", encrypted_content="gA=="), "the reasoning is encrypted"),
        (reasoning("hm", content=[SUMMARY]), "the reasoning has a text and a different summary"),
        (reasoning("hm", content=[IMAGE]), "the reasoning has a part that is not text"),
    ],
)
def test_an_item_that_no_chat_can_hold_is_refused_by_name(refused, item, got):
    said = message()
    for record, place in (
        (run(item, answer("f"), said), OUTPUT),
        (run(said, **asked(item, user("Go."))), INPUT),
    ):
        error = refused(record)
        assert (error.rule, error.got) == ("message", got)
        assert error.where.endswith(f"a.jsonl:1, {place}")


@pytest.mark.parametrize(
    ("item", "rule", "got"),
    [
        (user([IMAGE]), "message", "a content part of type 'input_image'"),
        ({"role": "system", "content": "Stop."}, "message_role", "role 'system'"),
        (message(role="critic"), "message_role", "role 'critic'"),
        (function_call("f", arguments="{"), "tool_arguments", "arguments '{'"),
        (answer("f") | {"output": {"error": "lost"}}, "record_type", "`object`"),
    ],
)
def test_an_item_that_a_chat_cannot_render_is_refused(refused, item, rule, got):
    error = refused(run(message(), item, message()))
    assert error.rule == rule
    assert got in error.got
    assert "a.jsonl:1" in error.where


@pytest.mark.parametrize("name", ["previous_response_id", "conversation", "prompt"])
def test_a_request_whose_input_is_elsewhere_is_refused(refused, name):
    error = refused(run(message(), **asked(user("Go."), **{name: "resp_0"})))
    assert error.rule == "message"
    assert error.where.endswith(f"responses_create_params.{name}")


@pytest.mark.parametrize("tool", [{"type": "web_search"}, {"type": "custom", "name": "f"}, {}])
def test_a_tool_that_is_no_function_is_refused(refused, tool):
    error = refused(run(message(), **asked(user("Go."), tools=[LS, tool])))
    assert error.rule == "tools"
    assert error.where.endswith("a.jsonl:1, responses_create_params.tools[1]")
    assert repr(tool.get("type")) in error.got


def test_tools_in_the_form_of_chats_are_functions_too(rows):
    named = {"type": "function", "function": {k: v for k, v in LS.items() if k != "type"}}
    one, other = (run(message(), **asked(user("Go."), tools=[tool])) for tool in (LS, named))
    assert rows(one)[0]["prompt_token_ids"] == rows(other)[0]["prompt_token_ids"]


@pytest.mark.parametrize(
    ("template", "fields", "rule", "got"),
    [
        ("qwen3_without_thinking", {"tools": [LS]}, "chat_template", "takes no tools"),
        ("qwen3_without_thinking", {}, "text_kept", "the chat template drops the reasoning 'hm'"),
        ("qwen3_acc_thinking", {}, "text_kept", "the chat template drops the reasoning 'hm'"),
    ],
)
def test_what_a_template_drops_is_refused(refused, template, fields, rule, got):
    record = run(reasoning("hm"), message(), **asked(user("Go."), **fields))
    error = refused(record, chat_template=template)
    assert error.rule == rule
    assert got in error.got


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_a_real_file_keeps_every_item_and_tool(harness_logs, tmp_path, choices, tokenizer, name):
    path, out = harness_logs / name, tmp_path / "ds"
    summary = convert([path], out, **choices()).summary
    assert (summary.num_written, summary.num_rejected) == (REAL[name], 0)
    rows = {row["source"]: row for row in rollout_io.read(out).to_pylist()}
    expected = read_source("nemo_gym", path)
    assert rows.keys() == expected.keys()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        record, place = json.loads(line), f"{path}:{number}"
        row, facts = rows[place], expected[place]
        assert (row["token_source"], row["reward"]) == ("retokenized", record["reward"])
        prompt = tokenizer.decode(row["prompt_token_ids"])
        assert missing_fact(facts, prompt + tokenizer.decode(row["response_ids"])) is None
        for tool in record["responses_create_params"]["tools"]:
            for text in (tool["name"], tool["description"], *tool["parameters"]["properties"]):
                assert json.dumps(text, ensure_ascii=False) in prompt
        text = "".join(trained(tokenizer, row))
        for item in record["response"]["output"]:
            if item["type"] == "function_call":
                assert f'{{"name": "{item["name"]}", "arguments": ' in text
            elif item["type"] == "function_call_output":
                assert f"<tool_response>\n{item['output'][:80]}" not in text


def item(text, **fields):
    return message(text, **fields)


def chats(table):
    return [[(m["role"], m["content"]) for m in json.loads(row["messages"])] for row in table]


def summary_of(tmp_path, choices, record):
    path = write(tmp_path / "b.jsonl", [record])
    return convert([path], tmp_path / "ds", **choices()).summary


def test_messages_with_different_ids_are_the_answers_of_several_calls(
    tmp_path, rows, choices, tokenizer
):
    said = ["click(10, 20)", "click(30, 40)", "DONE"]
    steps = [item(text, id=f"msg-step-{i}") for i, text in enumerate(said)]
    record = run(steps[0], steps[1], reasoning("Am I done?"), steps[2], **asked(user("Open it.")))
    (row,) = table = rows(record)
    assert chats(table) == [[("user", "Open it."), *(("assistant", text) for text in said)]]
    thought = "<think>\nAm I done?\n</think>\n\n"
    assert trained(tokenizer, row) == [
        f"{text}<|im_end|>" for text in (said[0], said[1], thought + said[2])
    ]
    assert summary_of(tmp_path, choices, record).notes == {UNSEEN: 2}


@pytest.mark.parametrize("ids", [("m", "m", "m"), ("m-0", "m-1", "m-2"), (None, None, None)])
def test_states_of_a_message_are_one_answer_neither_joined_nor_doubled(
    tmp_path, rows, choices, ids
):
    texts = ["The Nile", "The Nile is", "The Nile is long."]
    items = [item(text, **({"id": i} if i else {})) for text, i in zip(texts, ids, strict=True)]
    record = run(*items, **asked(user("Which?")))
    assert chats(rows(record)) == [[("user", "Which?"), ("assistant", texts[2])]]
    assert summary_of(tmp_path, choices, record).notes == {CUMULATIVE: 2}


def test_equal_messages_are_one_if_their_ids_are_equal_and_else_two(rows):
    twice = [item("Yes.", id="m"), item("Yes.", id="m"), item("Yes.", id="n")]
    answers = [("assistant", "Yes.")] * 2
    assert chats(rows(run(*twice, **asked(user("Go?"))))) == [[("user", "Go?"), *answers]]


def test_messages_without_ids_are_joined_which_is_counted(tmp_path, rows, choices):
    record = run(item("One."), item("Two."), **asked(user("Go.")))
    assert chats(rows(record)) == [[("user", "Go."), ("assistant", "One.\nTwo.")]]
    assert summary_of(tmp_path, choices, record).notes == {WITHOUT_IDS: 1}
