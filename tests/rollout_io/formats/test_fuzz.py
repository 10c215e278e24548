import json
import random
import shutil
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout_io import convert, read
from rollout_io.conversion.plan import Keywords
from rollout_io.conversion.rewards import read_rewards
from rollout_io.formats.base import Rejected, Run
from rollout_io.formats.detect import load_formats, recognize
from rollout_io.formats.parsing.jsonl import UNREADABLE
from schemas import check
from schemas.errors import RolloutError
from tests.conftest import EXAMPLES, ROOT
from tests.helpers.adapter_helpers import convert_with, planned
from tests.helpers.conversation_writers import WRITERS, log_of
from tests.helpers.line_log_helpers import save_template
from tests.helpers.mutations import damaged, possible_counts

pytestmark = pytest.mark.slow

MAX_BYTES, MAX_SECONDS = 100_000, 10
NUM_ORDINARY, NUM_NIGHTLY = 200, 20_000
PEERS = ROOT / "tests" / "data" / "peers"
SMOLLM2 = ROOT / ".cache" / "smollm2"


FORMATS = load_formats().adapters
PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 5?"}]
ANSWER = {"role": "assistant", "content": "6"}
FUNCTION = {"name": "add", "arguments": "{}"}
CALL = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": FUNCTION}]}
RESULT = {"role": "tool", "content": "6", "tool_call_id": "c"}
SAID = [*PROMPT, CALL | {"content": ""}, RESULT, ANSWER | {"tool_calls": []}]


class Source(NamedTuple):
    """A log that a harness wrote: a file, or a directory of the format."""

    path: Path
    is_lines: bool


INLINE = {
    "dumped/3.jsonl": [
        {"input": "user\n1 + 5?\nassistant\n", "output": "6", "score": 1.0, "step": 3, "acc": True},
        {"input": "user\n2 + 2?\nassistant\n", "output": "5", "score": 0.0, "step": 3, "gts": None},
    ],
    "evals/gsm8k.jsonl": [
        {"input_prompt": "1 + 5?", "output_response": "6", "score": s, "env_class": "gsm8k"}
        for s in (1.0, [0.0, 1.0], None)
    ],
    "messages.jsonl": [
        {"messages": [*PROMPT, ANSWER], "instance_id": "sum-1", "reward": 1.0, "tools": []},
        {"messages": [*PROMPT, CALL, RESULT, ANSWER], "id": 7, "scores": {"style": 0.5}},
        [*PROMPT, ANSWER, *PROMPT, ANSWER],
    ],
}
"""Of formats of which no real log lies beside the tests."""


def save_inline(folder):
    """Logs made up after the formats' own documentation."""
    for name, records in INLINE.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    columns = {
        "step": [7, 7],
        "prompt": [PROMPT, PROMPT],
        "completion": [[ANSWER], [ANSWER]],
        "correct": [1.0, 0.0],
        "advantage": [0.7, -0.7],
    }
    pq.write_table(pa.table(columns), folder / "completions_00007.parquet")


def find_sources(*roots):
    """Logs by format, below some directories."""
    found = {name: [] for name in FORMATS}
    for path in sorted(path for root in roots for path in root.rglob("*")):
        for name in recognize(path, FORMATS):
            found[name].append(Source(path, _is_lines(FORMATS[name], path)))
    return found


@pytest.fixture(scope="module")
def sources(request, tmp_path_factory):
    roots = [EXAMPLES, PEERS, tmp_path_factory.mktemp("inline")]
    save_inline(roots[-1])
    with suppress(pytest.skip.Exception):
        roots.append(request.getfixturevalue("harness_logs"))
    sources, made = find_sources(*roots), tmp_path_factory.mktemp("made")
    for name, (_, file) in WRITERS.items():
        if not sources.get(name, True):
            (made / name).mkdir()
            (made / name / file).write_bytes(log_of(name, SAID)[0])
            sources[name] = find_sources(made / name)[name]
    return sources


@pytest.fixture(scope="module")
def choices(tmp_path_factory):
    """How the damaged logs are converted: text is re-tokenized, where a tokenizer is at hand."""
    template = save_template(tmp_path_factory.mktemp("template"))
    tokens = {"tokenizer": str(SMOLLM2), "chat_template": template} if SMOLLM2.is_dir() else {}
    return {"on_error": "skip", **tokens}


def _is_lines(adapter, path):
    """Whether every line of a log is a record."""
    if path.is_dir():
        return False
    plan = planned(adapter, path)
    places = [place for run in plan.runs for place in run.places]
    places += [rejected.place for rejected in plan.rejected]
    names = {f"{path}:{n}" for n, line in enumerate(path.read_bytes().split(b"\n"), 1) if line}
    return path.suffix == ".jsonl" and {place.where for place in places} == names


def damaged_copy(source, rng, folder):
    """A copy of a log in which something is wrong."""
    copy = folder / source.path.name
    if source.path.is_dir():
        shutil.copytree(source.path, copy)
        file = rng.choice(sorted(path for path in copy.rglob("*") if path.is_file()))
        if rng.random() < 0.05:
            file.unlink()
        else:
            file.write_bytes(damaged(file.read_bytes(), rng))
        return copy
    content = source.path.read_bytes()
    if source.is_lines and len(content) > MAX_BYTES:
        content = _some_lines(content, rng)
    copy.write_bytes(damaged(content, rng))
    return copy


def _some_lines(content, rng):
    """Lines in a row, as many as fit."""
    lines = content.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    some = lines[at : at + 1]
    for line in lines[at + 1 :]:
        if sum(map(len, some)) + len(line) > MAX_BYTES:
            break
        some.append(line)
    return b"".join(some)


def watched(adapter):
    """An adapter that remembers what it finds."""
    found = []

    def find(inputs, progress):
        for item in adapter.find(inputs, progress):
            found.append(item)
            yield item

    return replace(adapter, find=find), found


def convert_damaged(adapter, source, rng, folder, choices):
    """What became of a damaged log: "dataset", or the rule by which all of it was refused."""
    log = damaged_copy(source, rng, folder)
    assert isinstance(recognize(log, FORMATS), list)
    adapter, found = watched(adapter)
    try:
        conversion, table = convert_with(adapter, [log], folder, **choices)
    except RolloutError as error:
        refused = error
    else:
        refused = None
    runs = [item for item in found if isinstance(item, Run)]
    records = [item.place for item in found if isinstance(item, Rejected)]
    records += [place for run in runs for place in run.places]
    if source.is_lines and (refused is None or refused.rule == "no_calls"):
        assert len(records) in possible_counts(log.read_bytes())
    if refused is not None:
        assert refused.rule
        assert refused.got
        if refused.rule == "no_calls" and records:
            assert_accounted(found, [], folder)
        return refused.rule
    errors = check(table).filter(severity="error")
    assert errors.is_empty(), errors.to_dicts()
    assert_accounted(found, table["trajectory_id"].to_pylist(), folder, is_table=adapter.is_table)
    summary = conversion.summary
    assert summary.num_written + summary.num_rejected == summary.num_records == len(records)
    assert summary.num_rows == table.num_rows > 0
    return "dataset"


def assert_accounted(found, written, folder, *, is_table=False):
    """Each record is in `DS.rejected.jsonl` once, or its run is in the dataset; no run is in parts."""
    file = folder / "ds.rejected.jsonl"
    lines = file.read_bytes().splitlines() if file.exists() else []
    rejected = Counter(json.loads(line)["source"] for line in lines)
    assert all(json.loads(line)["rule"] and json.loads(line)["got"] for line in lines)
    assert UNREADABLE not in {json.loads(line)["rule"] for line in lines}
    wanted, whole = [item.place.where for item in found if isinstance(item, Rejected)], set()
    for run in found:
        if isinstance(run, Run):
            places = [place.where for place in run.places]
            if rejected.keys() & set(places):
                wanted += places
            else:
                whole.add(f"{run.instance_id}_{run.repetition_id}")
    assert Counter(wanted) == rejected
    assert is_table or whole == set(written)


def outcomes_of(name, sources, numbers, choices):
    """Convert the damaged logs with these numbers; how often each came to what."""
    if not sources:
        pytest.skip(f"no log of {name} here")
    outcomes = Counter()
    for number in numbers:
        rng = random.Random(f"{name} {number}")
        source = rng.choice(sources)
        start = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            try:
                outcome = convert_damaged(FORMATS[name], source, rng, Path(folder), choices)
            except BaseException as error:
                error.add_note(f"damaged log {number} of {name}: {source.path}")
                raise
        outcomes[outcome] += 1
        assert time.process_time() - start < MAX_SECONDS, f"log {number} of {name}: {source.path}"
    return outcomes


@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_log_gives_sound_rows_or_named_reasons_and_no_record_is_lost(
    name, sources, choices
):
    numbers = range(NUM_ORDINARY // len(FORMATS) + 1)
    assert outcomes_of(name, sources[name], numbers, choices).total() == len(numbers)


def test_a_damaged_rewards_file_is_refused_or_each_of_its_outcomes_is_accounted_for(tmp_path):
    lines = (EXAMPLES / "shop.calls.jsonl").read_bytes().splitlines(keepends=True)[:40]
    (tmp_path / "calls.jsonl").write_bytes(b"".join(lines))
    content = b"".join((EXAMPLES / "shop.rewards.jsonl").read_bytes().splitlines(keepends=True)[:9])
    num_read = 0
    for number in range(100):
        rewards, out = tmp_path / f"{number}.jsonl", tmp_path / f"ds{number}"
        rewards.write_bytes(damaged(content, random.Random(f"rewards {number}")))
        choices = Keywords(format="calls", rewards=str(rewards), on_error="skip")
        try:
            convert([tmp_path / "calls.jsonl"], out, **choices)
        except RolloutError:
            assert not out.exists()
            continue
        table = read(out)
        assert check(table).filter(severity="error").is_empty()
        found = set(table["trajectory_id"].to_pylist()) | rejected_sources(out)
        for session, outcome in read_rewards(rewards).items():
            instance, _, repetition = session.rpartition("/")
            names = {f"{instance}_{repetition}", session, f"{session}_0", f"{session}_1"}
            assert found & {*names, outcome.where}
        num_read += 1
    assert 10 < num_read < 90


def rejected_sources(out):
    file = out.with_name(f"{out.name}.rejected.jsonl")
    lines = file.read_bytes().splitlines() if file.exists() else []
    return {json.loads(line)["source"] for line in lines}


@pytest.mark.nightly
@pytest.mark.parametrize("name", FORMATS)
def test_no_damage_is_too_odd(name, sources, choices):
    numbers = range(1000, 1000 + NUM_NIGHTLY // len(FORMATS))
    assert outcomes_of(name, sources[name], numbers, choices).total() == len(numbers)
