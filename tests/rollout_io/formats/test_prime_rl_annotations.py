"""Annotations of prime-rl: its rows have what the files say, read by plain code that shares nothing."""

import json
import struct

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollout_io
from pipelines import merge, unmerge
from rollout_io import RolloutWriter, convert
from rollout_io.formats.engines.files import Start
from rollout_io.formats.verifiers import ADAPTER
from schemas import check
from schemas.errors import RolloutError
from tests.helpers.adapter_helpers import planned, read_all, write_lines
from tests.helpers.verifiers_helpers import PEER, episode, lines_of, node, trace, turns

STREAMS = ["trainer_logprobs", "advantages", "entropies", "is_masked", "mismatch_kl"]
SHIPPED = {"effective": True, "advantage": 0.125, "ship": {"step": 3, "time": 1.5}}


def update(trace_id="t1", info=None, branches=(), **fields):
    return {
        "version": 1,
        "trace_id": trace_id,
        "info": info or {},
        "branches": list(branches),
    } | fields


def branch(index=0, **streams):
    return {"index": index, **streams}


def sealed(*lines):
    """A chunk as prime-rl seals it: Zstandard frames, and their table in a frame to skip."""
    frames = [pa.compress(line, "zstd", asbytes=True) for line in lines]
    sizes = b"".join(struct.pack("<II", len(f), len(t)) for f, t in zip(frames, lines, strict=True))
    table = sizes + struct.pack("<IBI", len(lines), 0, 0x8F92EAB1)
    return b"".join(frames) + struct.pack("<II", 0x184D2A5E, len(table)) + table


def as_lines(*records):
    return [json.dumps(record).encode() + b"\n" for record in records]


def save_run(folder, episodes, **annotations):
    """The traces of a run as prime-rl writes them, the first chunk sealed."""
    (folder / "stream").mkdir(parents=True)
    (folder / "stream" / "00000.jsonl.zst").write_bytes(sealed(*as_lines(*episodes[:-1])))
    (folder / "stream" / "00001.jsonl").write_bytes(b"".join(as_lines(*episodes[-1:])))
    rows = [
        {"line": i + 1, "id": e["id"], "kind": "train", "chunk": 0} for i, e in enumerate(episodes)
    ]
    (folder / "stream.index.jsonl").write_bytes(b"".join(as_lines(*rows)))
    for producer, records in annotations.items():
        (folder / "annotations" / producer).mkdir(parents=True)
        chunk = folder / "annotations" / producer / "00000.jsonl"
        chunk.write_bytes(b"".join(as_lines(*records)))
        index = [{"trace_id": r["trace_id"], "chunk": 0, "offset": 0, "info": {}} for r in records]
        beside = folder / "annotations" / f"{producer}.index.jsonl"
        beside.write_bytes(b"".join(as_lines(*index)))
    return folder


def told(trace, updates):
    """What a plain reader finds: the facts, and for each sampled message its tokens and values."""
    nodes, facts = trace["nodes"], {}
    inner = {n.get("parent") for n in nodes}
    paths = []
    for leaf in (i for i in range(len(nodes)) if i not in inner):
        path = [leaf]
        while nodes[path[0]].get("parent") is not None:
            path.insert(0, nodes[path[0]]["parent"])
        paths.append(path)
    values = [{} for _ in nodes]
    for each in updates:
        facts = deep(facts, each["info"])
        for streams in each["branches"]:
            for name in STREAMS:
                left = list(streams.get(name) or [])
                for i in paths[streams["index"]]:
                    size = len(nodes[i]["token_ids"])
                    own, left = (left + [None] * size)[:size], left[size:]
                    known = [v for v, m in zip(own, nodes[i]["mask"], strict=True) if m]
                    if any(v is not None for v in known):
                        values[i][name] = own
    found = {}
    for i, each in enumerate(nodes):
        if any(each["mask"]):
            start = each["mask"].index(True)
            stop = len(each["mask"]) - each["mask"][::-1].index(True)
            ids = tuple(each["token_ids"][start:stop])
            found[ids] = {name: own[start:stop] for name, own in values[i].items()}
    return facts, found


def deep(old, new):
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return old | {k: deep(old.get(k), v) for k, v in new.items()}


def check_rows(rows, facts, found):
    assert {tuple(r["response_ids"]) for r in rows} == set(found)
    for row in rows:
        wanted = found[tuple(row["response_ids"])]
        assert row.get("effective") == facts.get("effective")
        assert row.get("advantage") == facts.get("advantage")
        assert json.loads(row.get("annotations") or "{}") == facts
        for name in STREAMS[1:]:
            assert row.get(name) == wanted.get(name)
        logprobs = wanted.get("trainer_logprobs")
        if logprobs is None:
            assert row.get("trainer_logprobs") is None
        else:
            zeros = [v or 0.0 for v in logprobs]
            assert row["trainer_logprobs"] == np.array(zeros, np.float32).tolist()


TRAINED = branch(
    trainer_logprobs=[None, None, None, -0.4375, -0.3125, None, None, None, -0.875],
    entropies=[None, None, None, 1.25, 0.1, None, None, None, 2.0],
    is_masked=[None, None, None, True, False, None, None, None, None],
    mismatch_kl=[None, None, None, 1e-6, None, None, None, None, None],
)
SCORED = branch(advantages=[0.0, 0.0, 0.0, 0.5, 0.25, 0.0, 0.0, 0.0, -0.1])


def rows_of(path, out):
    summary = convert([path], out).summary
    table = rollout_io.read(out)
    assert check(table).filter(severity="error").is_empty()
    return summary, table


def test_a_run_has_the_annotations_of_its_traces_as_columns(tmp_path):
    one, other = (
        trace(id="t1"),
        trace([node(None, ids=[1]), node(0, "assistant", [9], [1])], id="t2"),
    )
    episodes = [episode(one, id="e1"), episode(other, id="e2")]
    shipped = [update(info=SHIPPED, branches=[SCORED])]
    trained = [update(info={"ship": {"step": 4}}, branches=[TRAINED])]
    run = save_run(tmp_path / "traces", episodes, orch=shipped, trainer=trained)
    summary, table = rows_of(run, tmp_path / "ds")
    assert (summary.num_records, summary.num_written) == (4, 4)
    rows = table.to_pylist()
    facts, found = told(one, [*shipped, *trained])
    assert facts == SHIPPED | {"ship": {"step": 4, "time": 1.5}}
    mine = [r for r in rows if r["response_ids"] != [9]]
    check_rows(mine, facts, found)
    assert [r["trainer_logprobs"] for r in mine] == [[-0.4375, -0.3125], [-0.875]]
    (plain,) = (r for r in rows if r["response_ids"] == [9])
    assert plain["effective"] is plain["trainer_logprobs"] is plain["entropies"] is None


@pytest.fixture
def annotated(tmp_path):
    log = write_lines(
        tmp_path / "a.jsonl",
        episode(trace(id="t1")),
        update(info=SHIPPED, branches=[SCORED, TRAINED]),
    )
    return rows_of(log, tmp_path / "ds")[1]


@pytest.mark.parametrize("layout", ["full", "prefix"])
def test_annotations_survive_layouts_merging_and_filters_and_polars_reads_them(
    annotated, layout, tmp_path
):
    with RolloutWriter(tmp_path / "laid", layout=layout) as writer:
        writer.write(annotated)
    frame = rollout_io.scan(tmp_path / "laid")
    back = unmerge(merge(frame)).collect()
    names = [*STREAMS, "effective", "advantage", "annotations"]
    assert back.select(names).equals(pl.from_arrow(annotated).select(names))
    merged = merge(frame).collect()
    assert merged["trainer_logprobs"].to_list() == [[-0.4375, -0.3125, 0.0, 0.0, 0.0, -0.875]]
    assert frame.filter(pl.col("effective"), pl.col("advantage") > 0.1).collect().height == 2


def test_the_real_annotations_are_those_of_their_traces(harness_logs, tmp_path):
    folder = harness_logs.parent / "harness_logs_2026" / "verifiers_v1"
    file = folder / "prime_rl_annotations.orchestrator.00000.jsonl"
    if not file.exists():
        pytest.skip("the logs of 2026 are not at hand")
    said = {r["trace_id"]: r for r in lines_of(file)}
    made, made_of = lines_of(folder / "traces.excerpt.jsonl")[0], []
    made["traces"][0]["nodes"][0] |= {"token_ids": [7], "mask": [False]}  # the file has no prompt
    for i, name in enumerate(said):
        copy = json.loads(json.dumps(made)) | {"id": f"e{i}"}
        copy["traces"][0]["id"] = name
        made_of.append(copy)
    runs, rejected = read_all(ADAPTER, write_lines(tmp_path / "stream.jsonl", *made_of), file)
    assert not rejected
    assert len(runs) == len(said) == 3
    for run, trajectory in runs:
        record = said[made_of[int(run.labels["episode"][1:])]["traces"][0]["id"]]
        for step in trajectory.steps:
            found = {name: value.as_py() for name, value in step.columns.items()}
            assert found["advantage"] == record["advantage"]
            assert found["effective"] == (record["subset"] == "effective")
            assert json.loads(found["annotations"]) | {"trace_id": record["trace_id"]} == record


@pytest.mark.parametrize("name", ["eval", "user_sim"])
def test_streams_of_real_traces_fall_on_the_tokens_they_were_made_of(name, tmp_path):
    """Each value names its token: it is found at that token, in every branch of a real log."""
    episodes = lines_of(PEER / name / "traces.jsonl")
    updates = []
    for number, each in enumerate(t for e in episodes for t in e["traces"]):
        each["id"] = f"t{number}"
        paths = [
            n
            for n in range(len(each["nodes"]))
            if n not in [m.get("parent") for m in each["nodes"]]
        ]
        for index, leaf in enumerate(paths):
            ids, at = [], leaf
            while at is not None:
                ids, at = each["nodes"][at]["token_ids"] + ids, each["nodes"][at].get("parent")
            made = branch(index, trainer_logprobs=[-i / 2**20 for i in ids], entropies=ids)
            updates.append(update(each["id"], branches=[made]))
    runs, rejected = read_all(ADAPTER, write_lines(tmp_path / "a.jsonl", *episodes, *updates))
    assert not rejected
    steps = [step for _, trajectory in runs for step in trajectory.steps]
    assert steps
    for step in steps:
        ids = step.response_ids.tolist()
        assert step.columns["entropies"].as_py() == ids
        assert step.trainer_logprobs.tolist() == np.float32([-i / 2**20 for i in ids]).tolist()


NUMBERS = st.one_of(st.none(), st.floats(-100, 0, width=32))


@st.composite
def annotated_traces(draw):
    """A tree of messages with distinct tokens, and annotations of its branches."""
    nodes, token = [], 10
    for i in range(draw(st.integers(2, 6))):
        size = draw(st.integers(1, 3))
        mask = draw(st.lists(st.booleans(), min_size=size, max_size=size)) if i else [False] * size
        ids, token = list(range(token, token + size)), token + size
        parent = draw(st.integers(0, i - 1)) if i else None
        nodes.append(node(parent, "assistant" if any(mask) else "user", ids, mask))
    leaves = [i for i in range(len(nodes)) if i not in {n.get("parent") for n in nodes}]
    updates = []
    for _ in range(draw(st.integers(1, 4))):
        index = draw(st.integers(0, len(leaves) - 1))
        size, at = 0, leaves[index]
        while at is not None:
            size, at = size + len(nodes[at]["token_ids"]), nodes[at].get("parent")
        streams = {}
        for name in draw(st.sets(st.sampled_from(STREAMS))):
            one = st.one_of(st.none(), st.booleans()) if name == "is_masked" else NUMBERS
            streams[name] = draw(st.lists(one, max_size=size))
        keys = draw(st.sets(st.sampled_from(list(SHIPPED))))
        updates.append(
            update(info={k: SHIPPED[k] for k in keys}, branches=[branch(index, **streams)])
        )
    return trace(nodes, id="t1"), updates


@given(annotated_traces())
def test_any_annotations_are_what_a_plain_reader_finds(tmp_path_factory, made):
    one, updates = made
    facts, found = told(one, updates)
    path = write_lines(tmp_path_factory.mktemp("a") / "a.jsonl", *updates, episode(one))
    runs, rejected = read_all(ADAPTER, path)
    if not found:
        assert {r.error.rule for r in rejected} == {"no_calls"}
        return
    assert not rejected
    steps = runs[0][1].steps
    rows = [
        {n: v.as_py() for n, v in s.columns.items()}
        | {"response_ids": s.response_ids.tolist()}
        | {"trainer_logprobs": None if s.trainer_logprobs is None else s.trainer_logprobs.tolist()}
        for s in steps
    ]
    check_rows(rows, facts, found)


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        (update(version=2), "record_type"),
        (update(info={"effective": "yes"}), "record_type"),
        (update(info={"advantage": "0.5"}), "record_type"),
        (update(branches=[{"entropies": [0.5]}]), "record_type"),
        (update(branches=[branch(entropies=[True])]), "record_type"),
        (update(branches=[branch(is_masked=[0.5])]), "record_type"),
        (update(branches=[branch(1, entropies=[0.5])]), "dangling_reference"),
        (update(branches=[branch(-1, entropies=[0.5])]), "dangling_reference"),
        (update(branches=[branch(entropies=[0.5] * 10)]), "lengths_align"),
        (update(branches=[branch(trainer_logprobs=[0.5] * 9)]), "logprobs_nonpositive"),
        (update(branches=[branch(trainer_logprobs=[-9999.0] * 9)]), "logprobs_finite"),
        (update("t2"), "dangling_reference"),
    ],
)
def test_an_annotation_that_does_not_fit_its_trace_is_refused_by_name(wrong, rule, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", episode(trace(id="t1")), wrong)
    runs, rejected = read_all(ADAPTER, path)
    at_fault = [r.error for r in rejected if r.error.rule == rule]
    assert at_fault
    assert at_fault[0].where.startswith(f"{path}:2")
    assert len(runs) == (wrong["trace_id"] == "t2")


def test_an_annotation_of_two_episodes_is_of_neither(tmp_path):
    episodes = [episode(trace(id="t1"), id=name) for name in ("e1", "e2")]
    runs, rejected = read_all(ADAPTER, write_lines(tmp_path / "a.jsonl", *episodes, update()))
    assert len(runs) == 2
    assert "which several episodes have" in rejected[0].error.got


def test_a_stream_of_an_unknown_name_is_named_and_a_trace_without_a_row_is_counted(tmp_path):
    judge = trace([node(None, ids=[1])], id="t1", agent={"name": "judge", "trainable": False})
    wrong = update(branches=[branch(curvature=[0.5])])
    path = write_lines(tmp_path / "a.jsonl", episode(judge, trace(turns(), id="t2")), wrong)
    ((_, found),), _ = read_all(ADAPTER, path)
    assert found.unread == {"branches.curvature": 1}
    assert found.notes["annotated traces without a row"] == 1


def test_annotations_without_episodes_are_refused_with_a_hint(tmp_path):
    path = write_lines(tmp_path / "00000.jsonl", update())
    assert ADAPTER.recognizes(Start(path))
    assert not planned(ADAPTER, path).runs
    with pytest.raises(RolloutError, match="convert the annotations together"):
        convert([path], tmp_path / "ds")


def test_a_text_only_trace_has_the_facts_and_no_streams(tmp_path):
    said = trace([node(None), node(0, "assistant")], id="t1")
    path = write_lines(tmp_path / "a.jsonl", episode(said), update(info=SHIPPED))
    ((_, found),), _ = read_all(ADAPTER, path)
    assert found.steps[0].columns["advantage"].as_py() == 0.125


def test_a_column_of_the_rewards_file_of_the_same_name_is_refused(tmp_path):
    log = write_lines(tmp_path / "a.jsonl", episode(trace(id="t1")), update(info=SHIPPED))
    rewards = write_lines(
        tmp_path / "r.jsonl", {"session": "k1/0", "reward": 1.0, "effective": "no"}
    )
    with pytest.raises(RolloutError, match="effective"):
        convert([log], tmp_path / "ds", rewards=str(rewards))
