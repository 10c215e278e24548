import json
import shutil
import zipfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_io.formats.base import noted
from rollout_io.formats.engines import files
from rollout_io.formats.engines.files import REPLACED, Start
from rollout_io.formats.inspect_ai import ADAPTER
from schemas.errors import RolloutError
from tests.conftest import ROOT
from tests.helpers import adapter_helpers as helpers
from tests.helpers.adapter_helpers import convert_with
from tests.helpers.text_log_helpers import (
    check_survives,
    found_in,
    mutated,
    read_all,
    read_one,
    roles,
    save,
)

HASH = "0123456789abcdef0123456789abcdef"
CHOICE = {"index": 0, "finish_reason": "stop", "token_ids": [7], "message": {"content": "a"}}
EXACT = {"request": {}, "response": {"prompt_token_ids": [1, 2], "choices": [CHOICE]}}
USER = {"role": "user", "content": "q", "source": "input"}


def assistant(content, **fields):
    return {"role": "assistant", "content": content, "source": "generate", **fields}


def model(prompt, reply, **fields):
    choices = [{"message": reply, "stop_reason": "stop"}]
    event = {"event": "model", "model": "m", "input": prompt, "tools": [], "config": {}}
    return {**event, "output": {"model": "m", "choices": choices}, **fields}


def sample(identity=1, epoch=1, **fields):
    found = {"id": identity, "epoch": epoch, "input": "q", "target": "t"}
    return {**found, "messages": [USER, assistant("a")], **fields}


def log(*samples, status="success", task="t", **fields):
    head = {"version": 2, "status": status, "eval": {"task": task, "model": "m"}, **fields}
    return {**head, "samples": list(samples)}


def read(tmp_path, *args, **fields):
    return read_one(ADAPTER, save(tmp_path / "a.json", log(sample(*args, **fields))))


def pack(path, document, **members):
    """A log as an .eval archive: its samples are members."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        head = {name: value for name, value in document.items() if name != "samples"}
        archive.writestr("_journal/start.json", json.dumps({**head, "status": "started"}))
        for record in document["samples"]:
            name = f"samples/{record['id']}_epoch_{record['epoch']}.json"
            archive.writestr(name, json.dumps(record))
        archive.writestr("summaries.json", "[]")
        archive.writestr("header.json", json.dumps(head))
        for name, content in members.items():
            archive.writestr(f"samples/{name}.json", content)
    return path


@pytest.fixture
def logs(harness_logs):
    return harness_logs / "inspect_ai"


@pytest.fixture
def security_guide(logs):
    return logs / "2025-05-12T20-28-26-04-00_security-guide.json"


def test_real_samples_are_runs_with_attachments_resolved_and_the_graders_calls_left_out(
    security_guide,
):
    runs, rejected, about = found_in(ADAPTER, security_guide)
    assert [(run.instance_id, run.repetition_id) for run in runs] == [("1", 1), ("2", 1), ("3", 1)]
    assert (rejected, about) == ([], {})
    found = read_all(ADAPTER, security_guide)
    assert [[roles(step) for step in f.steps] for f in found] == [["sua"]] * 3
    assert [f.reward for f in found] == [1.0] * 3
    assert [f.metrics for f in found] == [{"model_graded_fact": 1.0}] * 3
    assert found[0].steps[0].messages[0]["content"].startswith("\nYou are a computer security")
    assert found[0].steps[0].stop_reason == "stop"


def test_a_real_log_as_an_archive_reads_the_same(security_guide, tmp_path):
    document = json.loads(security_guide.read_bytes())
    path = pack(tmp_path / "a.eval", document)
    assert ADAPTER.recognizes(Start(path))
    packed, plain = read_all(ADAPTER, path), read_all(ADAPTER, security_guide)
    assert [p.steps[0].messages for p in packed] == [p.steps[0].messages for p in plain]
    assert [p.metrics for p in packed] == [p.metrics for p in plain]
    places = [run.places[0].where for run in found_in(ADAPTER, path)[0]]
    assert places == [f"{path}, samples/{n}_epoch_1.json" for n in (1, 2, 3)]


@pytest.mark.filterwarnings("ignore:Duplicate name")  # how zipfile writes it
def test_members_that_a_later_one_replaces_are_counted(tmp_path):
    path = pack(tmp_path / "a.eval", log(sample(1, result="old"), sample(1), sample(2)))
    with noted() as notes:
        found = read_all(ADAPTER, path)
    assert len(found) == 2
    assert notes == {REPLACED: 1}


def test_the_real_sample_of_tool_results_alone_is_refused(logs):
    path = logs / "log_tool_call_error.json"
    (run,), _, _ = found_in(ADAPTER, path)
    assert (run.instance_id, run.repetition_id) == ("1", 4)
    with pytest.raises(RolloutError, match=r"samples\[0\]"):
        read_one(ADAPTER, path)


def test_an_archive_as_inspect_writes_it_today_reads_as_its_document():
    data = ROOT / "tests" / "data" / "inspect_zstd"
    packed, plain = (read_all(ADAPTER, data.with_suffix(end)) for end in (".eval", ".json"))
    assert [[roles(s) for s in found.steps] for found in packed] == [["suata"]] * 2
    assert [f.steps[0].messages for f in packed] == [f.steps[0].messages for f in plain]


@pytest.mark.parametrize("at", ["file_size", "CRC", "compress_size"])
def test_a_zstandard_member_of_another_size_or_content_is_damaged(tmp_path, monkeypatch, at):
    data = ROOT / "tests" / "data" / "inspect_zstd.eval"
    path = Path(shutil.copy(data, tmp_path / "a.eval"))
    members = files.members_of(path, "a")
    name = next(n for n in members if n.startswith("samples/"))
    for value in (getattr(members[name], at) - 1, getattr(members[name], at) + 1):
        monkeypatch.setattr(files._opened_zip(path, "a").getinfo(name), at, value)
        with pytest.raises(RolloutError, match="zip_archive"):
            files.read_member(path, name, "a")


def test_a_zstandard_member_is_unpacked_no_further_than_it_says(tmp_path):
    bomb = pa.Codec("zstd").compress(b"0" * (64 << 20), asbytes=True)
    path = tmp_path / "a.eval"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("header.json", bomb)
    files.read_member(path, "header.json", "a")
    member = files._opened_zip(path, "a").getinfo("header.json")
    member.compress_type, member.file_size = 93, 100
    before = pa.total_allocated_bytes()
    with pytest.raises(RolloutError, match="zip_archive"):
        files.read_member(path, "header.json", "a")
    assert pa.total_allocated_bytes() - before < 1 << 20


@pytest.mark.parametrize("failure", [{"error": "server down"}, {"output": {"error": "refused"}}])
def test_a_call_that_failed_is_no_call(tmp_path, failure):
    failed = model([USER], assistant(""))
    failed["output"] |= failure.pop("output", {})
    events = [failed | failure, model([USER], assistant("a"))]
    (conversation,) = read(tmp_path, events=events).steps
    assert [m["content"] for m in conversation.messages] == ["q", "a"]


@pytest.mark.parametrize(
    ("value", "metrics", "reward"),
    [
        ("C", {"s": 1.0}, 1.0),
        ("I", {"s": 0.0}, 0.0),
        ("P", {"s": 0.5}, 0.5),
        ("N", {"s": 0.0}, 0.0),
        ("Yes", {"s": 1.0}, 1.0),
        ("0.25", {"s": 0.25}, 0.25),
        (True, {"s": 1.0}, 1.0),
        (3, {"s": 3.0}, 3.0),
        ("good", {}, None),
        (None, {}, None),
        ({"a": "C", "b": 0.5}, {"s.a": 1.0, "s.b": 0.5}, None),
        (["C", 2], {"s[0]": 1.0, "s[1]": 2.0}, None),
    ],
)
def test_scores_count_as_inspect_counts_them(tmp_path, value, metrics, reward):
    found = read(tmp_path, scores={"s": {"value": value}})
    assert (found.metrics, found.reward) == (metrics, reward)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "data:image/png;base64,iVBORw0KGgo=", "detail": "auto"},
        {"type": "audio", "audio": "data:audio/wav;base64,UklGRg==", "format": "wav"},
        {"type": "video", "video": "clips/first take.mp4", "format": "mp4"},
        {"type": "document", "document": "data:application/pdf;base64,JVBERi0=", "filename": "a b"},
    ],
)
def test_the_parts_of_a_message_that_are_read_are_not_named_as_unread(part, tmp_path):
    asked = {**USER, "content": [{"type": "text", "text": "What?"}, part]}
    path = save(tmp_path / "a.json", log(sample(messages=[asked, assistant("a")])))
    ((_, found),), rejected = helpers.read_all(ADAPTER, path)
    assert (rejected, found.unread) == ([], {})
    (step,) = found.steps
    kinds = [each["type"] for each in step.messages[0]["content"]]
    assert kinds == ["text", part["type"]]


def test_of_several_scores_none_is_the_reward_until_one_is_chosen(tmp_path):
    scores = {"a": {"value": "C"}, "b": {"value": "I"}}
    event = model([USER], assistant("a"), call=EXACT)
    path = save(tmp_path / "a.json", log(sample(scores=scores, events=[event])))
    assert read_one(ADAPTER, path).reward is None
    _, table = convert_with(ADAPTER, [path], tmp_path, reward="b")
    assert table.column("reward").to_pylist() == [0.0]


def test_numbers_that_are_none_are_no_scores(tmp_path):
    path = tmp_path / "a.json"
    record = log(
        sample(scores={"a": {"value": float("nan")}, "b": {"value": 2, "x": 'NaN \\" NaN'}})
    )
    path.write_text(json.dumps(record), encoding="utf-8")
    assert "NaN}" in path.read_text(encoding="utf-8")
    found = read_one(ADAPTER, path)
    assert (found.metrics, found.reward) == ({"b": 2.0}, 2.0)


def test_calls_of_several_contexts_and_agents_are_several_conversations(tmp_path):
    one, two = assistant("a"), assistant("b")
    other = [{"role": "user", "content": "sub"}]
    events = [
        model([USER], one),
        model(other, assistant("s"), role="critic"),
        model([USER, one, USER], two),
        model([{"role": "user", "content": "summary"}], assistant("c")),
    ]
    found = read(tmp_path, events=events).steps
    assert [(step.agent, roles(step)) for step in found] == [
        (None, "uaua"),
        ("critic", "ua"),
        (None, "ua"),
    ]


def test_calls_of_scorers_are_none_of_the_agents(tmp_path):
    graded = model([USER], assistant("GRADE: C"), span_id="inner")
    events = [
        model([USER], assistant("a"), span_id="solver"),
        {"event": "span_begin", "id": "outer", "type": "scorer", "name": "f"},
        {"event": "span_begin", "id": "inner", "parent_id": "outer", "name": "g"},
        graded,
        {"event": "step", "action": "begin", "type": "scorer", "name": "f"},
        model([USER], assistant("old")),
        {"event": "step", "action": "end", "type": "scorer", "name": "f"},
    ]
    (conversation,) = read(tmp_path, events=events).steps
    assert conversation.messages[-1]["content"] == "a"


def test_inputs_in_the_pool_are_put_back(tmp_path):
    reply = assistant("a")
    refs = model([], assistant("b"), input_refs=[[0, 1], [2, 3], [1, 2]])
    pool = {"messages": [USER, {"role": "user", "content": "z"}, reply], "calls": []}
    found = read(tmp_path, events=[model([USER], reply), refs], events_data=pool).steps
    assert [message["content"] for message in found[0].messages] == ["q", "a", "z", "b"]
    with pytest.raises(RolloutError, match=r"events\[0\].*\[0, 9\], but the pool has only 3"):
        read(tmp_path, events=[refs | {"input_refs": [[0, 9]]}], events_data=pool)


def test_attachments_are_resolved_wherever_they_stand(tmp_path):
    call = {"id": "c", "function": "f", "arguments": {"x": [f"attachment://{HASH}"]}}
    reply = assistant(
        [{"type": "reasoning", "reasoning": f"attachment://{HASH}"}], tool_calls=[call]
    )
    found = read(tmp_path, events=[model([USER], reply)], attachments={HASH: 'lo"ng'})
    message = found.steps[0].messages[-1]
    assert message["reasoning_content"] == 'lo"ng'
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"x": ['lo"ng']}
    with pytest.raises(RolloutError, match="dangling_reference"):
        read(tmp_path, events=[model([USER], reply)])


def test_a_failed_tool_says_its_error_as_inspect_sends_it(tmp_path):
    error = {"type": "timeout", "message": "too slow"}
    result = {"role": "tool", "tool_call_id": "c", "content": "", "function": "f", "error": error}
    found = read(tmp_path, messages=[USER, assistant("a"), result, assistant("b")])
    assert found.steps[0].messages[2] == {
        "role": "tool",
        "content": "Error: too slow",
        "tool_call_id": "c",
    }


def test_exact_ids_of_raw_responses_are_steps(tmp_path):
    event = model([USER], assistant("a"), call=EXACT)
    record = sample(events=[event], scores={"s": {"value": "C"}})
    _, table = convert_with(ADAPTER, [save(tmp_path / "a.json", log(record))], tmp_path)
    assert table.column("response_ids").to_pylist() == [[7]]
    assert table.column("token_source").to_pylist() == ["engine"]
    assert table.column("reward").to_pylist() == [1.0]


def test_epochs_are_repetitions_and_tasks_part_of_the_name(tmp_path):
    one = save(tmp_path / "a.json", log(sample("x", 1), sample("x", 2)))
    runs, _, _ = found_in(ADAPTER, one)
    assert [(run.instance_id, run.repetition_id) for run in runs] == [("x", 1), ("x", 2)]
    two = save(tmp_path / "b.json", log(sample("x", 1), task="u"))
    runs, _, _ = found_in(ADAPTER, one, two)
    assert [run.instance_id for run in runs] == ["t/x", "t/x", "u/x"]


def test_a_log_that_did_not_end_well_is_named(tmp_path):
    record = log(sample(), status="error", error={"message": "out of credit", "traceback": "..."})
    path = save(tmp_path / "a.json", record)
    assert found_in(ADAPTER, path)[2] == {"log_status": {str(path): "error: out of credit"}}
    assert read_one(ADAPTER, path).user_values["log_status"] == "error"


def test_a_log_without_samples_is_refused(tmp_path):
    path = save(tmp_path / "a.json", log(status="started"))
    _, (rejected,), about = found_in(ADAPTER, path)
    assert (rejected.error.rule, about["log_status"]) == ("no_samples", {str(path): "started"})


def test_a_started_archive_has_its_journal_alone(tmp_path):
    path = tmp_path / "a.eval"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("_journal/start.json", json.dumps({"version": 2, "eval": {"task": "t"}}))
        archive.writestr("samples/1_epoch_1.json", json.dumps(sample()))
    assert ADAPTER.recognizes(Start(path))
    (run,), _, about = found_in(ADAPTER, path)
    assert (run.labels["status"], about["log_status"]) == ("started", {str(path): "started"})


@pytest.mark.parametrize(
    ("fields", "options", "error", "reward"),
    [
        ({"error": {"message": "boom"}}, {}, "boom", 1.0),
        ({"limit": {"type": "message", "limit": 9}}, {}, None, 1.0),
        ({"limit": {"type": "time", "limit": 9}}, {}, "time limit", 1.0),
        ({"limit": {"type": "time", "limit": 9}}, {"timeouts": "keep"}, None, 1.0),
        ({"limit": {"type": "context", "limit": 9}}, {}, None, 0.0),
        ({"limit": {"type": "context", "limit": 9}}, {"overflows": "fail"}, "context limit", 1.0),
    ],
)
def test_failures_and_limits_follow_the_options(tmp_path, fields, options, error, reward):
    path = save(tmp_path / "a.json", log(sample(scores={"s": {"value": "C"}}, **fields)))
    found = read_one(ADAPTER, path, **options)
    assert (found.error, found.reward) == (error, reward)


def test_a_member_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_MEMBER_BYTES", 1000)
    path = pack(tmp_path / "a.eval", log(sample()), bomb_epoch_1=b" " * 10**6)
    runs, (rejected,), _ = found_in(ADAPTER, path)
    assert len(runs) == 1
    assert rejected.error.rule == "zip_archive"
    assert "1000000 bytes unpacked" in rejected.error.got


def test_a_damaged_archive_is_refused_by_name(tmp_path):
    path = pack(tmp_path / "a.eval", log(sample()))
    path.write_bytes(path.read_bytes()[:200])
    assert not ADAPTER.recognizes(Start(path))
    _, (rejected,), _ = found_in(ADAPTER, path)
    assert rejected.error.rule == "zip_archive"


TOOL_CALL = {"id": "c", "function": "f", "arguments": {"a": 1}}
RESULT = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "o"}]}
CALLED = assistant("a", tool_calls=[TOOL_CALL])
RECORD = sample(
    events=[
        model([USER], CALLED),
        model([USER, CALLED, RESULT], assistant(f"attachment://{HASH}")),
    ],
    scores={"s": {"value": {"a": "C"}}},
    attachments={HASH: "long"},
    limit={"type": "time", "limit": 3},
)
DOCUMENT = json.dumps(log(RECORD)).encode()


@given(st.data())
def test_no_damage_gives_anything_but_rows_or_named_errors(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damaged") / "a.json"
    path.write_bytes(data.draw(mutated(DOCUMENT)))
    check_survives(ADAPTER, path)


@given(st.data())
def test_damaged_members_are_named_too(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damaged") / "a.eval"
    damaged = data.draw(mutated(json.dumps(RECORD).encode()))
    pack(path, log(), x_epoch_1=damaged)
    check_survives(ADAPTER, path)


@given(st.integers(0, 2000), st.binary(min_size=1, max_size=4))
def test_flipped_bytes_of_an_archive_are_named(tmp_path_factory, at, noise):
    path = pack(tmp_path_factory.mktemp("damaged") / "a.eval", log(RECORD))
    content = path.read_bytes()
    at %= len(content)
    path.write_bytes(content[:at] + noise + content[at + len(noise) :])
    ADAPTER.recognizes(Start(path))
    runs, rejected, _ = found_in(ADAPTER, path)
    assert len(runs) + len(rejected) >= 1
    assert all(isinstance(item.error, RolloutError) for item in rejected)
    read_all(ADAPTER, path)
