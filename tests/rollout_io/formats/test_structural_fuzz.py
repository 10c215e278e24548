"""Logs with one wrong field: each row says what the field says, or its record is refused by name.

The mutations are of the log's tree (`structural_mutations`); what a row must hold is read from the
mutated log by plain json code (`plain_rows`).
"""

import json
import random
import re
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

import rollout_io
from rollout_io import convert
from rollout_io.conversion.plan import Keywords
from rollout_io.formats.parsing.jsonl import UNREADABLE
from schemas import check
from schemas.errors import RolloutError
from tests.helpers.plain_rows import READERS, differences, expected
from tests.helpers.plain_said import SAID, unsaid
from tests.helpers.plain_values import NotCompared
from tests.helpers.structural_logs import FORMATS, Log, find_sources
from tests.helpers.structural_mutations import mutated

NUM_ORDINARY, NUM_NIGHTLY = 4, 500
MAX_SECONDS = 30
GYM_IDS = re.compile(rb'"generation_token_ids": \[\d')
"""Ids of NeMo Gym's logs, most of which are those of another tokenizer."""

NOT_SAVED = (ValueError, TypeError, OverflowError, NotImplementedError, AttributeError)
pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(scope="module")
def sources(request, tmp_path_factory):
    return find_sources(request, tmp_path_factory.mktemp("made"))


def mutate(source, rng, folder):
    """A copy of a log with one or two fields wrong, and what was done to it."""
    log = Log(source, rng, folder)
    num = rng.choice([1, 1, 1, 1, 2])
    while True:
        tree, changes = log.tree, []
        for _ in range(num):
            tree, change = mutated(tree, rng)
            changes.append(change)
        try:
            log.write(tree, rng)
        except NOT_SAVED:
            continue
        return log, f"{log.file.relative_to(folder)}: {', '.join(changes)}"


def check_case(name, source, rng, folder, tokenizer, outcomes):
    log, change = mutate(source, rng, folder)
    try:
        check_log(name, log, folder / "ds", tokenizer, outcomes)
    except BaseException as error:
        error.add_note(change)
        raise


def check_log(name, log, out, tokenizer, outcomes):
    """Convert a log; what is written equals what the log says, and every record is counted."""
    text = {"tokenizer": tokenizer.name, "chat_template": "chatml_tools_thinking"}
    is_text = FORMATS[name].is_text and not GYM_IDS.search(log.file.read_bytes())
    choices = Keywords(format=name, on_error="skip", **(text if is_text else {}))
    try:
        summary = convert([log.path], out, **choices).summary
    except RolloutError as error:
        refusal = error
    else:
        refusal = None
    if refusal is not None:
        assert refusal.rule != UNREADABLE, refusal
        outcomes["refused"] += 1
        return
    file = out.with_name(f"{out.name}.rejected.jsonl")
    rejected = (
        [json.loads(line) for line in file.read_bytes().splitlines()] if file.exists() else []
    )
    assert summary.num_records == summary.num_written + summary.num_rejected
    assert summary.num_rejected == len(rejected)
    assert all(line["rule"] and line["got"] for line in rejected)
    assert UNREADABLE not in {line["rule"] for line in rejected}, rejected
    table = rollout_io.read(out)
    errors = check(table).filter(severity="error")
    assert errors.is_empty(), errors.to_dicts()
    rollout_io.validate(out)
    rows = table.to_pylist()
    if log.is_lines and log.file == log.path:
        check_no_line_is_lost(log.path, summary.num_records, rejected)
    outcomes["partly refused" if rejected else "written"] += 1
    outcomes["rows"] += len(rows)
    outcomes["rejected"] += len(rejected)
    for own in trajectories_of(rows):
        compare(name, own, tokenizer, outcomes)
    if name in SAID:
        assert unsaid(name, log.path, rows) == []
        outcomes["rows compared"] += len(rows)


def check_no_line_is_lost(path, num_records, rejected):
    """Each line is one record, and each of the rejected ones is another line."""
    lines = [n for n, line in enumerate(path.read_bytes().split(b"\n"), 1) if line.strip()]
    assert num_records == len(lines)
    places = [line["source"] for line in rejected]
    assert len(set(places)) == len(places)
    named = {int(place.rpartition(":")[2].partition("[")[0]) for place in places}
    assert named <= set(lines)


def trajectories_of(rows):
    found = {}
    for row in rows:
        found.setdefault(row["trajectory_id"], []).append(row)
    return found.values()


def compare(name, rows, tokenizer, outcomes):
    """The rows of a trajectory hold what a plain reader finds."""
    if name not in READERS:
        return
    try:
        wanted = expected(name, rows)
    except NotCompared:
        outcomes["not compared"] += len(rows)
        return
    except Exception as error:
        if all(row.get("error") is not None for row in rows):
            return
        error.add_note(f"{name}: a row where the log holds no such value: {rows[0]['source']}")
        raise
    assert differences(wanted, rows, tokenizer.decode) == []
    outcomes["rows compared"] += len(rows)


def outcomes_of(name, numbers, sources, tokenizer):
    outcomes = Counter()
    for number in numbers:
        rng = random.Random(f"structure {name} {number}")
        source = rng.choice(sources[name])
        start = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            try:
                check_case(name, source, rng, Path(folder), tokenizer, outcomes)
            except BaseException as error:
                error.add_note(f"mutated log {number} of {name}: {source}")
                raise
        assert time.process_time() - start < MAX_SECONDS, f"log {number} of {name}: {source}"
    return outcomes


@pytest.mark.parametrize("key", ["content", "reasoning_content", "arguments", "name"])
def test_the_plain_check_notices_a_value_that_the_log_lacks(key, tmp_path):
    log = tmp_path / "a.jsonl"
    log.write_text('{"a": ["Go.", "Hm.\\nWell."], "b": {"call": "ls", "path": "a b"}}\n')
    call = {"name": "ls", "arguments": '{"path": "a b", "n": 1}'}
    said = {"role": "assistant", "content": "Go.\nWell.", "reasoning_content": "Hm."}
    message = said | {"tool_calls": [{"function": call}]}
    assert unsaid("pi", log, [{"messages": json.dumps([message])}]) == []
    holder = call if key in call else message
    holder[key] = holder[key].replace("a b", "a c") if key == "arguments" else "Gone."
    assert unsaid("pi", log, [{"messages": json.dumps([message])}]) != []


@pytest.mark.parametrize("name", FORMATS)
def test_a_wrong_field_is_in_the_row_as_it_is_or_its_record_is_refused(name, sources, tokenizer):
    outcomes = outcomes_of(name, range(NUM_ORDINARY), sources, tokenizer)
    assert outcomes["refused"] + outcomes["partly refused"] + outcomes["written"] == NUM_ORDINARY


@pytest.mark.nightly
@pytest.mark.parametrize("name", FORMATS)
def test_no_wrong_field_is_too_odd(name, sources, tokenizer):
    outcomes = outcomes_of(name, range(1000, 1000 + NUM_NIGHTLY), sources, tokenizer)
    assert outcomes["rows compared"] or name not in {*READERS, *SAID}
