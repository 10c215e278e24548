"""Every text of a real log is in the rows, left out on purpose, or named as not read.

The walker over the logs shares no code with the adapters: it only takes their lists of what they
leave out. A text that no answer follows was not sent to the model, so it is in no row.
"""

import functools
import json
import operator
import re

import pytest

from rollout_io.conversion.text import Retokenizer, with_tokens
from rollout_io.formats.base import Step
from rollout_io.formats.contexts import SUMMARIES
from rollout_io.formats.detect import load_formats, recognize
from rollout_io.formats.gemini_cli import REMINDER
from rollout_io.formats.grammar import SELF
from rollout_io.formats.hermes import THOUGHTS
from schemas.errors import RolloutError
from tests.helpers.adapter_helpers import read_all

FORMATS = load_formats().adapters
ESCAPE = re.compile(r"\\+(?:u[0-9a-fA-F]{4}|[nrtbf\"/])?")
MIN_CHARS = 24
NO_MESSAGES = {
    # What is read as a name, an outcome or a column, or is the model's response in another form.
    "openhands": ("issue", "error", "test_result", "args", "resolved"),
    "prime_hosted": ("metrics",),
    "skyrl_evals": ("env_extras",),
}


def words(text):
    """The words of a text, without escapes, whose letters would join the words."""
    return " ".join(re.findall(r"\w+", ESCAPE.sub(" ", text)))


def split(entry, kind):
    """The type and the path of an entry of `leaves` or `inner`."""
    return entry.partition("/")[::2] if kind else ("", entry)


def texts_of(record, contents, path=""):
    """(path, text) of each text of a record that is not left out on purpose."""
    kind = record.get(contents.kind, contents.default) if contents.kind else ""
    parts = {kind, "*", f"{kind}:{record.get(contents.subkind)}"}
    left = [
        (found, below)
        for entries in contents.leaves.values()
        for found, _, below in (
            e.partition("/") if contents.kind else ("", "", e) for e in entries.split()
        )
        if found in parts and (below or found == kind)
    ]
    read = [
        path for name, paths in contents.reads.items() if name in parts for path in paths.split()
    ]
    if any(not below for _, below in left) and kind not in contents.reads:
        return
    inner = {
        below: contents if found is SELF else found
        for entry, found in contents.inner.items()
        for name, below in (split(entry, contents.kind),)
        if name in parts
    }

    def walk(value, keys):
        at = ".".join(keys)
        is_read = any(at == p or at.startswith(f"{p}.") for p in read)
        if not is_read and any(at == below for _, below in left):
            return
        if isinstance(value, list):
            for each in value:
                yield from walk(each, keys)
        elif isinstance(value, dict) and at in inner:
            yield from texts_of(value, inner[at], f"{path}{kind}.{at}.")
        elif isinstance(value, dict):
            for key, each in value.items():
                yield from walk(each, (*keys, key))
        elif isinstance(value, str) and len(value) >= MIN_CHARS and " " in value:
            yield f"{path}{kind}.{at}", value

    yield from walk(record, ())


def records_in(path):
    content = path.read_text(errors="replace")
    try:
        return [json.loads(content)]
    except ValueError:
        return [json.loads(line) for line in content.splitlines() if line.startswith("{")]


def listed(path, contents):
    """The records of a file; a bare list is the list that the format would have it in."""
    for record in records_in(path):
        if isinstance(record, list):
            yield from ({name: record} for name in contents.inner)
        elif "samples" in record and "samples" not in contents.inner:
            yield from record["samples"]
        elif "loglines" in record:
            yield from record["loglines"]
        else:
            yield record


def with_json(texts):
    """The texts, with those in a JSON text in its place."""
    for path, text in texts:
        try:
            value = json.loads(text) if text[:1] in "[{" else None
        except ValueError:
            value = None
        if isinstance(value, list | dict):
            strings = re.findall(r'"((?:[^"\\\\]|\\\\.)*)"', text)
            yield from ((path, each) for each in strings if len(each) >= MIN_CHARS and " " in each)
        else:
            yield path, text


FOLDERS = ("claude_code", "codex_cli", "gemini_cli", "harbor", "hermes", "mini_swe_agent")
FOLDERS += ("inspect_scout_openclaw", "openhands", "pi", "prime_hosted_rl", "qwen_code")
FOLDERS += ("swe_agent",)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("folder", FOLDERS)
def test_every_text_of_a_real_log_is_in_the_tokens_or_left_out_by_name(
    folder, harness_logs, smollm2_dir
):
    retokenizer = Retokenizer(directory=str(smollm2_dir), chat_template="chatml_tools_thinking")
    num_texts = 0
    for root in (harness_logs, harness_logs.parent / "harness_logs_2026"):
        for path in sorted((root / folder).rglob("*")):
            for name in recognize(path, FORMATS) if path.is_file() else ():
                num_texts += check(path, name, retokenizer)
    assert num_texts > 0


def check(path, name, retokenizer):
    """Check the texts of a file; return their number.

    Runs with notes miss what these count; exact ids are another tokenizer's.
    """
    contents = FORMATS[name].contents
    found, _ = read_all(FORMATS[name], path)
    is_exact = any(isinstance(step, Step) for _, made in found for step in made.steps)
    if (
        contents is None
        or not found
        or is_exact
        or any({*made.notes} - {SUMMARIES, REMINDER, THOUGHTS} for _, made in found)
    ):
        return 0
    decoded = ""
    for _, made in found:
        try:
            steps = with_tokens(made, retokenizer)
        except RolloutError:
            return 0  # refused by name, such as a chat without a prompt
        for step in steps:
            ids = [*map(int, step.prompt_token_ids), *map(int, step.response_ids)]
            decoded += f" {words(retokenizer.tokenizer.decode(ids))}"
    named = {key.rpartition(".")[2] for _, made in found for key in made.unread}
    records = [[*texts_of(record, contents)] for record in listed(path, contents)]
    # Records with a type are the events of a session; others are runs.
    for told in [functools.reduce(operator.iadd, records, [])] if contents.kind else records:
        texts = [
            (place, words(text))
            for place, text in with_json(told)
            if not named & {*re.split(r"\W+", place)}
            and not {*NO_MESSAGES.get(name, ())} & {*place.split(".")}
        ]
        is_known = [text in decoded for _, text in texts]
        # What follows the last known text was not sent.
        last = max((i for i, known in enumerate(is_known) if known), default=len(texts))
        missing = [texts[i] for i in range(last) if not is_known[i] and texts[i][1]]
        assert missing == [], path
    return sum(map(len, records))
