"""What every format of text promises, on one conversation as each program logs it."""

import pytest

from rollout_io.formats.detect import load_formats, recognize
from schemas.errors import RolloutError
from tests.helpers.adapter_helpers import convert_with, read_all
from tests.helpers.conversation_writers import EXACT_FORMATS, WRITERS, facts_in, log_of
from tests.helpers.source_facts import missing_fact, spelled
from tests.helpers.structural_logs import CONVERSATION

FORMATS = load_formats().adapters
NAMES = [*WRITERS, *EXACT_FORMATS]
each_format = pytest.mark.parametrize("name", NAMES)


def saved(folder, name, messages=CONVERSATION):
    """The format of a log, and its path."""
    content, file = log_of(name, messages)
    folder.mkdir(exist_ok=True)
    (folder / file).write_bytes(content)
    return name.split(",")[0], folder / file


@each_format
def test_a_log_is_recognized_as_one_format_with_all_its_keys(name, tmp_path):
    form, path = saved(tmp_path, name)
    # What a row of verifiers says in messages alone is what chats say.
    assert recognize(path, FORMATS) == ["chats" if name == "verifiers" else form]
    ((_, result),), rejected = read_all(FORMATS[form], path)
    assert (result.unread, rejected) == ({}, [])
    (step,) = result.steps
    assert missing_fact(facts_in(name, CONVERSATION), spelled(step.messages)) is None


NOT_JSON = ("goose", "opencode", "trl")
HEADED = ("droid", "inspect_ai", "kimi_cli", "nemo_gym", "traces")
"""Formats whose first object is left out on purpose, or has columns of the user's own."""


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_JSON + HEADED])
def test_a_text_that_a_format_does_not_know_is_named(name, tmp_path):
    form, path = saved(tmp_path, name)
    path.write_text(path.read_text().replace("{", '{"memo": "Read this.", ', 1))
    ((_, result),), _ = read_all(FORMATS[form], path)
    ((where, number),) = result.unread.items()
    assert (where.rpartition(".")[2], number) == ("memo", 1)


NAMED = ["cline", "copilot_cli", "droid", "gemini_cli", "gemini_cli, lines", "goose", "inspect_ai"]
NAMED += ["kimi_cli", "mini_swe_agent", "opencode", "openhands", "openhands_llm", "pi"]
NAMED += ["prime_hosted", "qwen_code", "rllm", "session_traces", "swe_agent", "verifiers"]
"""Formats in whose logs a run has a name, or no other run can say the same."""


@pytest.mark.parametrize("name", NAMED)
def test_a_copy_of_a_log_is_refused(name, tmp_path):
    form, path = saved(tmp_path / "a", name)
    runs, rejected = read_all(FORMATS[form], path, saved(tmp_path / "b", name)[1])
    assert (len(runs), {r.error.rule for r in rejected}) == (1, {"duplicate_record"})


ANSWERED = ("nemo_gym", "openhands_llm", "swe_agent, recorded after", "traces")
"""Formats whose records are answers."""


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ANSWERED])
def test_a_log_without_an_answer_has_no_calls(name, tmp_path):
    form, path = saved(tmp_path, name, CONVERSATION[:2])
    runs, rejected = read_all(FORMATS[form], path)
    assert (runs, {r.error.rule for r in rejected}) == ([], {"no_calls"})


@pytest.mark.parametrize("name", [name for name in NAMES if name != "trl"])  # it has text alone
def test_an_answer_of_thoughts_alone_is_an_answer(name, tmp_path):
    thought = {"role": "assistant", "content": "", "tool_calls": [], "reasoning_content": "2 + 2"}
    form, path = saved(tmp_path, name, [{"role": "user", "content": "4?"}, thought])
    ((_, result),), _ = read_all(FORMATS[form], path)
    (step,) = result.steps
    assert step.messages[-1]["reasoning_content"] == "2 + 2"


@each_format
def test_without_a_tokenizer_text_is_refused_with_the_way_to_give_one(name, tmp_path):
    form, path = saved(tmp_path, name)
    with pytest.raises(RolloutError) as caught:
        convert_with(FORMATS[form], [path], tmp_path)
    assert caught.value.rule == "no_token_ids"
    assert "--tokenizer" in caught.value.hint


@pytest.mark.parametrize("name", ["goose", "opencode"])
def test_a_damaged_page_of_a_database_costs_the_sessions_that_it_holds(name, tmp_path):
    form, path = saved(tmp_path, name)
    content = path.read_bytes()
    page = int.from_bytes(content[16:18], "big")
    rules, places = [], []
    for start in range(page, len(content), page):
        path.write_bytes(content[:start] + bytes(page) + content[start + page :])
        runs, rejected = read_all(FORMATS[form], path)
        rules.append([] if runs else [refusal.error.rule for refusal in rejected])
        places += [refusal.place.where for refusal in rejected]
    assert any(", session " in place for place in places)
    assert all(rule in (["sqlite_file"], ["no_calls"], []) for rule in rules), rules
