"""Every verb that takes a dataset checks it: what breaks an invariant is refused by its name."""

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rollout_io import RolloutWriter, read
from rollout_io.cli.main import run
from rollout_io.dataset.prefix_layout import encode_prefixes, trajectory_starts
from schemas import RULES, check
from schemas.errors import RolloutError
from schemas.metadata import DatasetMetadata
from schemas.strategies import broken_tables
from schemas.types import PREFIX_TYPES, cast_table, is_list
from tests.helpers.table_helpers import STEPS

# A model directory that passes the first check, so that train reads the dataset.
MODEL = tempfile.TemporaryDirectory()
(Path(MODEL.name) / "config.json").write_text("{}")
ERRORS = [name for name, rule in RULES.items() if rule.severity == "error"]
WRITING = {
    "merge": ["--out"],
    "merge-undo": ["--undo", "--out"],
    "filter": ["--drop-unknown", "--out"],
    "export-skyrl": ["--format", "skyrl", "--out"],
    "export-trl": ["--format", "trl", "--out"],
    "export-verl": ["--format", "verl", "--out"],
    "export-slime": ["--format", "slime", "--out"],
    "export-hf": ["--format", "hf", "--out"],
    "export-parquet": ["--format", "parquet", "--out"],
    "export-sft": ["--format", "sft", "--out"],
    "export-dpo": ["--format", "dpo_tokens", "--out"],
    "train": ["--model", MODEL.name, "--out"],
}
READING = {
    "validate": [],
    "stats": [],
    "drift": [],
    "inspect": ["--limit", "1000"],
    "filter": ["--drop-unknown", "--dry-run"],
}
PARALLEL = ("merge", "merge-undo", "validate", "stats", "drift")

relaxed = settings(
    deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)


def verbs(dataset, *more):
    """Each verb's command on a dataset, and what it would write."""
    for name, options in [*READING.items(), *WRITING.items()]:
        if not more or name in PARALLEL:
            writes = WRITING.get(name) is options
            out = dataset.parent / f"{name}.out" if writes else None
            verb = name.partition("-")[0]
            yield [verb, str(dataset), *more, *options, *([str(out)] if writes else [])], out


def assert_refused(rule, dataset, capfd, *more):
    before = sorted(dataset.parent.rglob("*"))
    for command, out in verbs(dataset, *more):
        code, said = run(command), capfd.readouterr()
        assert code == 1, (command, code, said.err)
        assert rule in said.err + said.out, (command, said.err)
        assert "unexpected" not in said.err, (command, said.err)
        assert out is None or not out.exists(), command
    assert sorted(dataset.parent.rglob("*")) == before


def written(table, folder, num_shards, layout):
    """The table as it is, past our writer, cut between trajectories into shards."""
    dataset = folder / "ds"
    dataset.mkdir()
    if layout == "prefix":
        table = encode_prefixes(table)
    names = table.column_names
    is_named = names.count("trajectory_id") == 1
    starts = trajectory_starts(table).tolist() if is_named else [0]
    cuts = starts[:: max(1, -(-len(starts) // num_shards))]
    for index, (start, end) in enumerate(zip(cuts, [*cuts[1:], table.num_rows], strict=True)):
        shard = table.slice(start, end - start)
        shard = shard.replace_schema_metadata(DatasetMetadata().encode(layout))
        pq.write_table(shard, dataset / f"part-{index:05d}.parquet")
    return dataset


def encodable(table):
    """Whether the table can be stored in the prefix layout as it is."""
    names = table.column_names
    if len(set(names)) < len(names) or "prompt_token_ids" not in names:
        return False
    prompts = table["prompt_token_ids"]
    if prompts.null_count or (is_list(prompts.type) and pc.list_flatten(prompts).null_count):
        return False  # the layout has no place for them
    try:
        encode_prefixes(cast_table(table))
    except (RolloutError, KeyError, ValueError, pa.ArrowException, TypeError, AttributeError):
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("num_examples", [1, pytest.param(15, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("rule", ERRORS)
def test_every_verb_refuses_a_dataset_that_breaks_an_invariant_and_writes_nothing(
    rule, num_examples, tmp_path_factory, capfd
):
    @given(broken_tables(rule), st.data())
    @settings(relaxed, max_examples=num_examples)
    def holds(table, data):
        layouts = ["full", "prefix"] if encodable(table) else ["full"]
        stored = "prefix" if PREFIX_TYPES.keys() <= set(table.column_names) else None
        layout = (stored and "full") or data.draw(st.sampled_from(layouts))
        num_shards = data.draw(st.integers(1, 3))
        dataset = written(table, tmp_path_factory.mktemp("broken"), num_shards, layout)
        assert_refused(rule, dataset, capfd)

    holds()


@pytest.mark.slow
@pytest.mark.parametrize("num_examples", [5, pytest.param(100, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("rule", [rule for rule in ERRORS if rule != "columns_and_types"])
def test_a_table_breaks_the_same_invariants_in_either_layout(rule, num_examples):
    @given(broken_tables(rule))
    @settings(relaxed, max_examples=num_examples)
    def holds(table):
        if encodable(table):
            assert rule in set(check(encode_prefixes(table))["rule"])

    holds()


@pytest.mark.nightly
@pytest.mark.parametrize("rule", ERRORS)
def test_every_verb_with_workers_refuses_a_dataset_that_breaks_an_invariant(
    rule, tmp_path_factory, capfd
):
    @given(broken_tables(rule))
    @settings(relaxed, max_examples=2)
    def holds(table):
        dataset = written(table, tmp_path_factory.mktemp("broken"), 3, "full")
        assert_refused(rule, dataset, capfd, "--workers", "2")

    holds()


@pytest.mark.parametrize(
    "more", [(), pytest.param(("--workers", "2"), marks=pytest.mark.slow)], ids=["one", "workers"]
)
def test_a_shard_copied_beside_itself_is_refused(more, shop_dataset, tmp_path, capfd):
    (tmp_path / "work").mkdir()
    dataset = tmp_path / "work" / "ds"
    with RolloutWriter(dataset, append=True) as writer:  # a shard that stands alone
        writer.write(read(shop_dataset))
    (shard,) = dataset.iterdir()
    (dataset / "part-00001.parquet").write_bytes(shard.read_bytes())
    assert_refused("unique_trajectory", dataset, capfd, *more)


@pytest.mark.slow
def test_a_trajectory_that_goes_on_in_a_later_shard_is_named_as_that(tmp_path, capfd):
    row = {name: list(values)[:1] for name, values in STEPS.items()}
    rows = [
        row | {"is_last_step": [True]},
        row | {"trajectory_id": ["a_1"], "repetition_id": [1], "is_last_step": [True]},
        row | {"step_index": [1], "is_last_step": [True]},
    ]
    schema = pa.table(STEPS).schema
    table = pa.concat_tables(pa.Table.from_pydict(r, schema=schema) for r in rows)
    (tmp_path / "work").mkdir()
    dataset = written(table, tmp_path / "work", 3, "full")
    assert_refused("contiguous_trajectory", dataset, capfd)
    assert_refused("contiguous_trajectory", dataset, capfd, "--workers", "2")


def test_steps_that_make_prompts_unreadable_are_named_and_not_the_prompts(tmp_path, capfd):
    steps = pa.table(STEPS | {"step_index": pa.array([0, -7], pa.int32())})
    (tmp_path / "work").mkdir()
    dataset = written(steps, tmp_path / "work", 1, "prefix")
    assert_refused("step_index_sequence", dataset, capfd)


def test_a_row_without_the_id_of_its_trajectory_is_named(tmp_path, capfd):
    steps = {**STEPS, "trajectory_id": ["a_0", None], "is_last_step": [True, True]}
    (tmp_path / "work").mkdir()
    dataset = written(pa.table(steps), tmp_path / "work", 1, "full")
    assert_refused("columns_and_types", dataset, capfd)
