"""What a footer says of its shard: its place among the others, and a digest of itself."""

import contextlib
import random
import subprocess
import sys
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.record.shards import OUTCOMES, Shards
from rollout_io import RolloutWriter, check, convert, read, read_metadata
from rollout_io.cli.main import run
from rollout_io.dataset.footer import seal
from schemas import DatasetMetadata
from schemas.errors import RolloutError
from schemas.metadata import DIGEST, ID_FILTERS, PLACE
from tests.conftest import EXAMPLES
from tests.helpers.refusals import assert_error
from tests.helpers.table_helpers import STEPS, write_example


def trajectories(num, length=1):
    """Rows of `num` trajectories, of one step each."""
    row = {name: column[-1:] for name, column in STEPS.items()}
    names = [f"a_{i}" for i in range(num)]
    tables = []
    for index, name in enumerate(names):
        changed = {"trajectory_id": [name], "repetition_id": pa.array([index], pa.int32())}
        changed |= {"step_index": pa.array([0], pa.int32())}
        responses = pa.array([[7] * length], pa.list_(pa.int32()))
        changed |= {"response_ids": responses, "loss_mask": [[True] * length]}
        tables.append(pa.table(row | changed))
    return pa.concat_tables(tables)


def sharded(path, table=None, **options):
    """A dataset of one row group a shard."""
    with RolloutWriter(path, row_group_rows=1, shard_bytes=1, **options) as writer:
        writer.write(trajectories(4) if table is None else table)
    return sorted(path.glob("*.parquet"))


def refusal(path):
    """The error of every way to open the dataset."""
    with pytest.raises(RolloutError) as caught:
        read(path)
    assert run(["validate", str(path)]) == run(["stats", str(path)]) == 1
    assert run(["merge", str(path), "--out", f"{path}.merged"]) == 1
    return caught.value


def test_a_dataset_with_all_its_shards_is_read_in_order(tmp_path):
    assert len(sharded(tmp_path / "ds")) == 4
    assert read(tmp_path / "ds").column("trajectory_id").to_pylist() == [f"a_{i}" for i in range(4)]


@pytest.mark.parametrize(
    ("missing", "names"),
    [
        (0, "is number 1"),
        (2, "a shard is missing"),
        (3, "after part-00002.parquet"),
    ],
)
def test_a_missing_shard_is_named(missing, names, tmp_path):
    sharded(tmp_path / "ds")[missing].unlink()
    assert_error(refusal(tmp_path / "ds"), "shards_complete", got=names)


def test_shards_that_changed_places_are_named(tmp_path):
    _, one, two, _ = sharded(tmp_path / "ds")
    (one_bytes, two_bytes) = one.read_bytes(), two.read_bytes()
    one.write_bytes(two_bytes)
    two.write_bytes(one_bytes)
    assert_error(refusal(tmp_path / "ds"), "shards_complete", got="part-00001.parquet")


@pytest.mark.parametrize("metadata", [None, DatasetMetadata(tokenizer="another")])
def test_a_shard_of_another_dataset_under_the_same_name_is_named(metadata, tmp_path):
    shards = sharded(tmp_path / "ds")
    others = sharded(tmp_path / "others", trajectories(4, length=2), metadata=metadata)
    shards[1].write_bytes(others[1].read_bytes())
    error = refusal(tmp_path / "ds")
    assert_error(error, "shards_complete", got="part-00000.parquet")
    assert_error(error, "shards_complete", got="part-00002.parquet")


@pytest.mark.slow
def test_a_missing_chunk_of_a_conversion_is_named_and_so_is_one_of_a_merge(tmp_path):
    log = tmp_path / "log.jsonl"
    line = '{"session": "a/%d", "request": {}, "final": true, "response": {"prompt_token_ids": [1, 2], '
    line += '"choices": [{"token_ids": [%d], "finish_reason": "stop", "message": {}}]}}\n'
    log.write_text("".join(line % (i, i + 3) for i in range(9)))
    convert([log], tmp_path / "ds", chunk_bytes=400)
    assert run(["merge", str(tmp_path / "ds"), "--out", str(tmp_path / "merged")]) == 0
    for name in ("ds", "merged"):
        shards = sorted((tmp_path / name).glob("*.parquet"))
        assert len(shards) > 3
        shards[2].unlink()
        assert refusal(tmp_path / name).rule == "shards_complete"


def test_several_whole_datasets_may_lie_in_one_directory(tmp_path):
    first = sharded(tmp_path / "ds")
    (second,) = sharded(tmp_path / "others", trajectories(9)[8:])
    second.rename(tmp_path / "ds" / "part-00001a.parquet")
    assert read(tmp_path / "ds").num_rows == 5
    first[-1].unlink()
    assert_error(refusal(tmp_path / "ds"), "shards_complete", got="after part-00002.parquet")


def test_a_glob_reads_a_part_of_a_dataset_and_appended_shards_stand_alone(tmp_path):
    sharded(tmp_path / "ds")[0].unlink()
    assert read(tmp_path / "ds" / "part-0000[12].parquet").num_rows == 2
    for table in (trajectories(1), trajectories(2)[1:]):
        with RolloutWriter(tmp_path / "appended", append=True) as writer:
            writer.write(table)
    min((tmp_path / "appended").iterdir()).unlink()
    assert read(tmp_path / "appended").num_rows == 1


def test_a_writer_that_was_killed_between_shards_leaves_a_dataset_that_is_refused(tmp_path):
    writer = RolloutWriter(tmp_path / "ds", row_group_rows=1, shard_bytes=1)
    writer.write(trajectories(4))
    assert_error(refusal(tmp_path / "ds"), "shards_complete", got="the shards after")
    writer.abort()


def anywhere(footer, number):
    """Places and bits of a footer."""
    draw = random.Random(0)
    return [(draw.randrange(len(footer)), draw.randrange(8)) for _ in range(number)]


def beside_names(footer):
    """Every bit next to two columns' names, where their types are, and of and before the metadata."""
    spans = [footer.index(name) + len(name) for name in (b"loss_mask", b"token_source")]
    spans += [footer.index(b"rollout_io.") - 6, footer.index(b"of/one")]
    return [(start + n, bit) for start in spans for n in range(6) for bit in range(8)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "choose",
    [
        beside_names,
        partial(anywhere, number=150),
        pytest.param(partial(anywhere, number=20_000), marks=pytest.mark.nightly),
    ],
    ids=["beside names", "150", "20000"],
)
def test_a_flipped_bit_in_a_footer_changes_nothing_or_is_refused(choose, tmp_path):
    table = pa.table(STEPS).append_column("note", pa.array([1.5, None]))
    with RolloutWriter(tmp_path / "ds", metadata=DatasetMetadata(tokenizer="of/one")) as writer:
        writer.write(table)
    file = tmp_path / "ds" / "part-00000.parquet"
    good, whole, metadata = file.read_bytes(), read(file), read_metadata(file)
    start = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
    flips, refused = choose(good[start:]), 0
    for at, bit in flips:
        damaged = bytearray(good)
        damaged[start + at] ^= 1 << bit
        file.write_bytes(damaged)
        try:
            found = read(file)
            assert found.equals(whole), (at, bit)
            assert found.schema.equals(whole.schema), (at, bit)  # names of list elements aside
            assert found.schema.metadata == whole.schema.metadata, (at, bit)
            assert read_metadata(file) == metadata, (at, bit)
        except RolloutError:
            refused += 1
    assert refused > len(flips) / 4


def test_the_digest_covers_types_that_parquet_coerces(tmp_path):
    times = pa.array([1, 2], pa.timestamp("s"))
    nested = pa.array([{"x": [1]}, None], pa.struct([("x", pa.large_list(pa.int8()))]))
    table = pa.table(STEPS).append_column("at", times).append_column("nested", nested)
    table = table.append_column("kind", pa.array(["x", "y"]).dictionary_encode())
    with RolloutWriter(tmp_path / "ds") as writer:
        writer.write(table)
    assert read(tmp_path / "ds").num_rows == 2


def test_a_file_that_another_program_rewrote_has_no_digest_and_is_read(tmp_path):
    file = write_example(tmp_path)
    table = pq.read_table(file).append_column("note", pa.array([1, 2]))
    pq.write_table(table, file)
    assert read(tmp_path / "ds").column("note").to_pylist() == [1, 2]


@pytest.mark.slow
def test_more_shards_than_open_files_are_read_checked_and_merged(tmp_path):
    sharded(tmp_path / "ds", trajectories(60))
    code = (
        "import resource, sys; from rollout_io.cli.main import run\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
        f"sys.exit(max(run([verb, {str(tmp_path / 'ds')!r}, *more]) for verb, more in "
        f"[('validate', []), ('stats', []), ('merge', ['--out', {str(tmp_path / 'out')!r}])]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert read(tmp_path / "out").num_rows == 60


@pytest.mark.slow
def test_a_limit_on_open_files_is_one_sentence(tmp_path):
    write_example(tmp_path)
    code = (
        "import os, resource, sys; from rollout_io.cli.main import run\n"
        "import rollout_io.dataset.checking, rollout_io.dataset.reader, rollout_io.cli.trajectory_text\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))\n"
        "held = []\n"
        "try:\n"
        "    while True: held.append(os.open(os.devnull, os.O_RDONLY))\n"
        "except OSError: pass\n"
        f"sys.exit(run(['validate', {str(tmp_path / 'ds')!r}, '--workers', '1']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "[open_files]" in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("num_free", [4, 8])
def test_a_limit_on_open_files_is_one_sentence_where_processes_are_started_too(num_free, tmp_path):
    log = EXAMPLES / "shop.calls.jsonl"
    code = (
        "import os, resource, sys; from rollout_io.cli.main import run\n"
        "import rollout_io.conversion.driver, rollout_io.dataset.opening, rollout_io.cli.trajectory_text\n"
        f"limit = len(os.listdir('/proc/self/fd')) - 1 + {num_free}\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))\n"
        f"sys.exit(run(['convert', {str(log)!r}, '--format', 'calls', '--workers', '2',"
        f" '--out', {str(tmp_path / 'ds')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "unexpected" not in done.stderr
    assert (done.returncode, done.stderr.count("[open_files]")) == (1, 1), done.stderr


VARIANTS = {
    "list_view": pa.list_view,
    "large_list": pa.large_list,
    "large_list_view": pa.large_list_view,
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_lists_of_every_variant_are_read_as_plain_ones_by_every_verb(variant, tmp_path, capfd):
    table = pa.table(STEPS).append_column("mine", pa.array([[[1], []], None]))
    for name in ("prompt_token_ids", "response_ids", "loss_mask", "mine"):
        index, values = table.column_names.index(name), table.column(name).to_pylist()
        inner = table.schema.field(name).type.value_type
        column = pa.array(values, VARIANTS[variant](inner))
        table = table.set_column(index, name, column)
    names = pa.array(table.column("trajectory_id").to_pylist(), pa.string_view())
    table = table.set_column(table.column_names.index("trajectory_id"), "trajectory_id", names)
    (tmp_path / "ds").mkdir()
    pq.write_table(table, tmp_path / "ds" / "part-00000.parquet")
    assert read(tmp_path / "ds").schema.field("response_ids").type == pa.list_(pa.int32())
    dataset = str(tmp_path / "ds")
    for command in (
        ["validate", dataset],
        ["stats", dataset],
        ["drift", dataset],
        ["inspect", dataset],
        ["filter", dataset, "--min-steps", "1", "--out", f"{dataset}-filtered"],
        ["merge", dataset, "--out", f"{dataset}-merged"],
        ["merge", "--undo", f"{dataset}-merged", "--out", f"{dataset}-back"],
        ["export", dataset, "--format", "hf", "--out", f"{dataset}-hf"],
    ):
        assert run(command) == 0, (command, capfd.readouterr().err)
    back, plain = read(f"{dataset}-back"), pa.table(STEPS)
    for name in STEPS:
        assert back.column(name).to_pylist() == plain.column(name).to_pylist()
    assert back.column("mine").to_pylist() == [[[1], []], None]
    assert check(dataset).is_empty()


FORGED = [b"", b"null", b"[]", b"7", b"{}", b"\xff", b'{"writing": 1}', b"[" * 100_000]
FORGED += [b'{"trajectory_id": {"digest": "x", "num_ids": "a"}}', b'{"a_0": [1.0, null]}']


@pytest.mark.slow
@pytest.mark.parametrize("value", FORGED, ids=range(len(FORGED)))
@pytest.mark.parametrize("key", [PLACE, ID_FILTERS, OUTCOMES, b"rollout_io.made_by"])
def test_a_footer_that_was_forged_with_its_digest_is_read_or_refused_by_name(
    key, value, tmp_path, capsys
):
    out = tmp_path / "forged"
    shard = write_example(tmp_path)
    out.mkdir()
    table = pq.read_table(shard)
    pairs = {k: v for k, v in pq.read_metadata(shard).metadata.items() if k.startswith(b"rollout")}
    pairs = {k: v for k, v in pairs.items() if k != DIGEST} | {key: value}
    try:
        digest = seal(table.schema.remove_metadata(), pairs, [table.num_rows])
    except UnicodeDecodeError:
        digest = {}
    schema = table.schema.with_metadata(pairs | digest)
    with pq.ParquetWriter(out / shard.name, schema) as writer:
        writer.write_table(table)
    before = shard.read_bytes(), (out / shard.name).read_bytes()
    where = "trajectory_id = 'a_0'"
    for line in (
        ["validate", out],
        ["stats", out],
        ["filter", out, "--where", where, "--dry-run"],
        ["merge", out, "--out", tmp_path / "merged"],
    ):
        assert run([str(part) for part in line]) in {0, 1}
    assert "unexpected" not in capsys.readouterr().err
    with contextlib.suppress(RolloutError):
        Shards(out, DatasetMetadata()).outcome_of("a/0")
    assert before == (shard.read_bytes(), (out / shard.name).read_bytes())
