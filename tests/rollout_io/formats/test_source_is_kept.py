"""Every role, text, thought, tool name and argument of a text log is in its trajectory's tokens.

In order, to the last answer; or the record was refused by name. Logs are read by `source_facts`,
which shares no code with the adapters.
"""

import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import rollout_io
from rollout_io.conversion.text import Retokenizer
from rollout_io.formats.detect import load_formats, recognize
from rollout_io.retokenize.chat_template import TEMPLATES
from schemas.errors import RolloutError
from tests.helpers.conversation_writers import (
    EXACT_FORMATS,
    WRITERS,
    as_logged,
    facts_in,
    log_of,
)
from tests.helpers.examples import examples
from tests.helpers.qwen import chat_template_of, save_qwen3
from tests.helpers.source_facts import READERS, missing_fact, read_source, spelled

pytestmark = pytest.mark.model
CHOICES = (None, *TEMPLATES)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return save_qwen3(tmp_path_factory.mktemp("qwen3"), chat_template_of("qwen3"))


@pytest.fixture
def directory_of(smollm2_dir, request):
    return lambda name: smollm2_dir if name == "smollm2" else request.getfixturevalue("qwen3")


def converted(path, out, **choices):
    """The source, tokens and messages of each trajectory's rows as text, and what was refused."""
    try:
        summary = rollout_io.convert([path], out, on_error="skip", **choices).summary
    except RolloutError:
        summary = None
    names = {"directory": choices["tokenizer"], "chat_template": choices["chat_template"]}
    decode = Retokenizer(**names).tokenizer.decode
    texts = {}
    for row in rollout_io.read(out).to_pylist() if summary else ():
        said = decode([*row["prompt_token_ids"], *row["response_ids"]])
        chat = spelled(json.loads(row["messages"]))
        texts.setdefault(row["trajectory_id"], []).append((row["source"], said, chat))
    file = out.with_name(f"{out.name}.rejected.jsonl")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    rejected = [json.loads(line) for line in lines]
    assert summary is None or summary.num_records == summary.num_written + len(rejected)
    return list(texts.values()), rejected


def check_file(path, name, out, **choices):
    expected = read_source(name, path)
    trajectories, rejected = converted(path, out, format=name, **choices)
    assert all(line["rule"] for line in rejected)
    for place, facts in expected.items():
        own = [rows for rows in trajectories if is_of(rows[0][0], place)]
        if not own:
            assert rejected, place
            assert any(is_of(line["source"], place) for line in rejected), (place, rejected[0])
        for rows in own:
            assert missing_fact(facts, "".join(said for _, said, _ in rows)) is None, place
            assert missing_fact(facts, "".join(chat for _, _, chat in rows)) is None, place
    return len(trajectories)


def is_of(source, place):
    return source == place or source.startswith((f"{place},", f"{place}:"))


def real_files(logs):
    """The logs of text formats, with their formats."""
    adapters = load_formats().adapters
    for path in sorted(p for p in logs.rglob("*") if p.is_file()):
        found = recognize(path, adapters)
        if len(found) == 1 and found[0] in READERS:
            yield path, found[0]


@pytest.mark.slow
@pytest.mark.parametrize("template", [None, "chatml_tools_thinking"])
def test_small_real_logs_keep_what_they_say(harness_logs, directory_of, tmp_path, template):
    names = ["gemini_cli/gemini-cli-trajectory.json", "swe_agent/function_calling_simple.traj"]
    names += ["claude_code/simonw.sample_session.jsonl", "mini_swe_agent/github_issue.traj.json"]
    for i, name in enumerate(names):
        path, choices = harness_logs / name, {"chat_template": template}
        choices["tokenizer"] = str(directory_of("smollm2"))
        num = check_file(path, name.split("/")[0], tmp_path / f"{i}", **choices)
        assert num == 1 or template is None


@pytest.mark.slow
def test_all_real_logs_keep_their_roles_tokens_and_messages(harness_logs, directory_of, tmp_path):
    choices = {"tokenizer": str(directory_of("smollm2")), "chat_template": "chatml_tools_thinking"}
    counts = [
        check_file(path, name, tmp_path / f"{i}", **choices)
        for i, (path, name) in enumerate(real_files(harness_logs))
    ]
    assert sum(counts) > 60


@pytest.mark.nightly
@pytest.mark.parametrize("tokenizer", ["smollm2", "qwen3"])
@pytest.mark.parametrize("template", CHOICES)
def test_all_real_logs_keep_what_they_say(
    harness_logs, directory_of, tmp_path, tokenizer, template
):
    choices = {"tokenizer": str(directory_of(tokenizer)), "chat_template": template}
    counts = [
        check_file(path, name, tmp_path / f"{i}", **choices)
        for i, (path, name) in enumerate(real_files(harness_logs))
    ]
    assert len(counts) > 15
    if template == "chatml_tools_thinking":
        assert sum(counts) > 60


WORD = st.sampled_from(
    ["search", "ls", "I will search now", "zebra", "é中", 'a "b"\n{c}', "4", "x"]
)
SCALAR = st.one_of(WORD, st.integers(-3, 10**20), st.booleans(), st.none(), st.just(1.5))
ARGUMENTS = st.dictionaries(
    st.sampled_from(["q", "path", "force"]), st.one_of(SCALAR, st.lists(SCALAR, max_size=2))
)


@st.composite
def conversations(draw):
    """OpenAI-style messages, each tool call with its result."""
    messages = [{"role": "user", "content": draw(WORD)}]
    if draw(st.booleans()):
        messages.insert(0, {"role": "system", "content": draw(WORD)})
    for _ in range(draw(st.integers(1, 3))):
        names = draw(st.lists(st.sampled_from(["search", "ls", "bash"]), max_size=2))
        calls = [
            {"id": f"c{len(messages)}{i}", "function": {"name": name, "arguments": draw(ARGUMENTS)}}
            for i, name in enumerate(names)
        ]
        said = {
            "role": "assistant",
            "content": draw(st.one_of(WORD, st.just(""))),
            "tool_calls": calls,
        }
        messages.append(said | draw(st.sampled_from([{}, {"reasoning_content": "2 + 2"}])))
        messages += [
            {"role": "tool", "content": draw(WORD), "tool_call_id": c["id"]} for c in calls
        ]
        messages += [{"role": "user", "content": draw(WORD)}] if draw(st.booleans()) else []
    return messages


ALL_FORMATS = WRITERS | EXACT_FORMATS
SAID = {"role": "assistant", "content": "search", "tool_calls": []}
TWO_ANSWERS = [{"role": "user", "content": "search"}, SAID, SAID]
NOTHING = {"role": "assistant", "content": "", "tool_calls": []}
CALLS = SAID | {"tool_calls": [{"id": "c0", "function": {"name": "search", "arguments": {}}}]}
RESULT = {"role": "tool", "content": "search", "tool_call_id": "c0"}
NO_LAST_ANSWER = [TWO_ANSWERS[0], CALLS, RESULT, NOTHING, NOTHING]
rare = settings(deadline=None, max_examples=4, suppress_health_check=list(HealthCheck))


def check_made(name, messages, out, tokenizer, template):
    content, file = log_of(name, messages)
    path = out.with_suffix("") / file
    path.parent.mkdir()
    path.write_bytes(content)
    choices = {"tokenizer": str(tokenizer), "chat_template": template, "format": name.split(",")[0]}
    trajectories, rejected = converted(path, out, **choices)
    facts = facts_in(name, messages)
    for rows in trajectories:
        # Behind a result at the end of a turn, Gemini's program puts an answer of its own: two rows.
        assert len(rows) == 1 or name == "gemini_cli, lines"
        _, text, chat = rows[-1]
        assert missing_fact(facts, text) is None
        assert missing_fact(facts, chat) is None
    says = any(
        m["role"] == "assistant" and (m["content"] or m["tool_calls"] or "reasoning_content" in m)
        for m in as_logged(name, messages)
    )
    if template == "chatml_tools_thinking" and says:
        assert ([line["rule"] for line in rejected], len(trajectories)) == ([], 1)
    assert trajectories or rejected


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL_FORMATS)
def test_a_conversation_in_any_format_keeps_what_it_says(name, smollm2_dir, tmp_path_factory):
    @rare
    @given(conversations())
    @example(TWO_ANSWERS)
    @example(NO_LAST_ANSWER)
    def holds(messages):
        out = tmp_path_factory.mktemp("made") / "ds.dir"
        check_made(name, messages, out, smollm2_dir, "chatml_tools_thinking")

    holds()


@pytest.mark.nightly
@pytest.mark.parametrize("tokenizer", ["smollm2", "qwen3"])
@pytest.mark.parametrize("template", CHOICES)
@pytest.mark.parametrize("name", ALL_FORMATS)
def test_any_template_keeps_a_conversation_or_is_refused(
    name, template, tokenizer, directory_of, tmp_path_factory
):
    @settings(rare, max_examples=examples(20))
    @given(conversations())
    def holds(messages):
        out = tmp_path_factory.mktemp("made") / "ds.dir"
        check_made(name, messages, out, directory_of(tokenizer), template)

    holds()
