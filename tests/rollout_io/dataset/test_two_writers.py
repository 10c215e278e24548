"""Of two writers to one destination the second is refused, and no writer touches what others own."""

import json
import shutil
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

import rollout_io
from pipelines.record.shards import lock_dataset
from rollout_io import convert
from rollout_io.cli.main import run
from rollout_io.conversion.plan import Keywords
from rollout_io.conversion.staging import Staging
from rollout_io.dataset.filesystems import whole
from rollout_io.dataset.locking import Destination
from rollout_io.dataset.reader import RowReader
from rollout_io.dataset.sources import Sources
from rollout_io.dataset.storage import Location, publish
from schemas.errors import RolloutError
from tests.helpers.conversion_helpers import call, in_subprocess, refusal, write

CHOICES = Keywords(format="calls")
VERBS = {
    "convert": "convert {log} --format calls --out {out}",
    "filter": "filter {ds} --where step_index>=0 --out {out}",
    "merge": "merge {ds} --out {out}",
    "undo": "merge --undo {ds} --out {out}",
    "parquet": "export {ds} --format parquet --out {out}",
    "hf": "export {ds} --format hf --out {out}",
    "skyrl": "export {ds} --format skyrl --out {out}",
    "trl": "export {ds} --format trl --out {out}",
    "verl": "export {ds} --format verl --out {out}",
}


@pytest.fixture
def given(tmp_path):
    log, ds = write(tmp_path / "log", *(call(f"a/{i}", 5) for i in range(3))), tmp_path / "ds"
    convert([log], ds, **CHOICES)
    table = rollout_io.read(ds)
    shutil.rmtree(ds)
    with rollout_io.RolloutWriter(ds) as writer:
        rewarded = table.drop_columns(["reward"])
        writer.write(rewarded.append_column("reward", pa.array([0.0, 1.0, 0.0])))
    return {"log": log, "ds": ds, "out": tmp_path / "out"}


def command(verb, given):
    return VERBS[verb].format(**given).split()


def run_verb(verb, given):
    """Run a verb that writes to `out`; return its exit code."""
    if verb != "record":
        return run(command(verb, given))
    try:
        lock_dataset(given["out"]).release()
    except RolloutError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


@pytest.mark.slow
@pytest.mark.parametrize("first", VERBS)
def test_of_two_writers_of_one_destination_the_second_is_refused(first, given, monkeypatch, capsys):
    """The first is held at the moment when it publishes, while each other writer tries."""
    from rollout_io.conversion import staging
    from rollout_io.dataset import filesystems, writer

    monkeypatch.setattr("pipelines.record.shards._LOCK_WAIT_S", 0.0)
    seconds, codes, out = [*VERBS, "record"], {}, given["out"]

    def held(move):
        def moved(written, final, *rest):
            path = Path(getattr(final, "path", final))
            if not codes and out in {path, path.parent}:
                codes.update(dict.fromkeys(seconds))
                codes.update({verb: run_verb(verb, given) for verb in seconds})
            return move(written, final, *rest)

        return moved

    for module in (staging, writer):
        monkeypatch.setattr(module, "publish", held(publish))
    for name in ("settle", "settle_new"):
        monkeypatch.setattr(filesystems, name, held(getattr(filesystems, name)))
    assert run(command(first, given)) == 0
    assert codes == dict.fromkeys(seconds, 1)
    assert capsys.readouterr().err.count("[out_is_free]") == len(seconds)
    if first in {"skyrl", "trl", "verl", "hf"}:
        assert out.exists()
    else:
        assert rollout_io.read(out).num_rows == 3
        assert sorted(path.name for path in out.iterdir()) == ["part-00000.parquet"]
    names = {path.name for path in out.parent.iterdir()}
    assert names <= {"log", "ds", "out", "log.jsonl"}


@pytest.mark.parametrize("verb", VERBS)
def test_every_writer_holds_the_same_lock(verb, given, capsys):
    held = Destination(given["out"])
    assert run(command(verb, given)) == 1
    assert "[out_is_free]" in capsys.readouterr().err
    assert not given["out"].exists()
    held.release()
    assert run(command(verb, given)) in {0, 1}  # some formats need rewards


def test_a_remote_destination_has_one_writer_in_a_process(tmp_path):
    out = f"memory://{tmp_path.name}/out"
    held = Destination(out)
    with pytest.raises(RolloutError, match="out_is_free"):
        Destination(out)
    held.release()
    Destination(out).release()


def test_publishing_never_replaces_a_file(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    with pytest.raises(RolloutError, match="out_is_free"):
        publish(Location.of(tmp_path / "a"), Location.of(tmp_path / "b"))
    assert (tmp_path / "b").read_text() == "b"

    def written():
        with whole(tmp_path / "c", is_new=True) as partial:
            partial.write_text("mine")
            (tmp_path / "c").write_text("theirs")

    with pytest.raises(FileExistsError):
        written()
    assert (tmp_path / "c").read_text() == "theirs"


def test_the_temporary_shards_of_killed_writers_are_removed_and_no_other_files(given):
    out = given["out"]
    out.mkdir()
    left = out / ".part-00000.parquet.0123abcd.tmp"
    for path in (left, out / ".notes.tmp", out / ".part-x.parquet.tmp"):
        path.write_text("x")
    assert run(command("filter", given)) == 0
    names = sorted(path.name for path in out.iterdir())
    assert names == [".notes.tmp", ".part-x.parquet.tmp", "part-00000.parquet"]


def killed(log, out, moves):
    """A conversion of three chunks that is killed after some moves of its publication."""
    code = """
import os, sys, rollout_io
from rollout_io.conversion import staging
done, publish = [], staging.publish
def stopped(*arguments):
    if len(done) == int(sys.argv[3]):
        os.kill(os.getpid(), 9)
    done.append(publish(*arguments))
staging.publish = stopped
rollout_io.convert([sys.argv[1]], sys.argv[2], format="calls", chunk_bytes=1)
"""
    assert in_subprocess("-c", code, log, out, moves).returncode == -signal.SIGKILL
    assert len(list(out.glob("*.parquet"))) == moves


@pytest.fixture
def foreign(tmp_path):
    """Files that no conversion may touch."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    rollout = folder / "part-00000.parquet"
    convert([write(tmp_path / "other", call("z/0", 5))], tmp_path / "zs", **CHOICES)
    (tmp_path / "zs" / "part-00000.parquet").rename(rollout)
    (folder / "notes").write_text("notes without a final newline")
    return folder


def forge_publishing(staging, foreign):
    forged = {str(path): f"../{path.name}" for path in foreign.iterdir()}
    (staging / "publishing.json").write_text(json.dumps(forged))


def second_chunk(staging):
    (chunk,) = staging.glob("chunk-00001.*")
    return chunk


def forge_shard(staging, foreign):
    content = (foreign / "part-00000.parquet").read_bytes()
    (second_chunk(staging) / "part-00001.parquet").write_bytes(content)


def forge_swapped_shard(staging, foreign):
    content = (foreign / "part-00000.parquet").read_bytes()
    (second_chunk(staging) / "part-00000.parquet").write_bytes(content)


def forge_report(staging, foreign):
    """Of a chunk that does not exist."""
    del foreign
    second_chunk(staging).with_name("chunk-00003.01234567").mkdir()
    content = (second_chunk(staging) / "report.json").read_bytes()
    (staging / "chunk-00003.01234567" / "report.json").write_bytes(content)


def forge_copied_chunk(staging, foreign):
    del foreign
    shutil.copytree(second_chunk(staging), staging / "chunk-00002.01234567")


def forge_linked_chunk(staging, foreign):
    chunk, moved = second_chunk(staging), staging.parent.parent / "moved"
    chunk.rename(moved)
    chunk.symlink_to(foreign)
    (foreign / "report.json").write_bytes((moved / "report.json").read_bytes())


def forge_linked_shard(staging, foreign):
    shard = second_chunk(staging) / "part-00000.parquet"
    shard.unlink()
    shard.symlink_to(foreign / "part-00000.parquet")


def forge_linked_files(staging, foreign):
    (staging / "rejected.jsonl").symlink_to(foreign / "notes")
    if not (staging / "inputs").exists():
        (staging / "inputs").symlink_to(foreign)


@contextmanager
def suppress_rollout_error(rules):
    try:
        yield
    except RolloutError as error:
        rules.append(error.rule)


FORGED = [
    *(forge_publishing, forge_shard, forge_swapped_shard, forge_report),
    *(forge_copied_chunk, forge_linked_chunk, forge_linked_shard, forge_linked_files),
]


@pytest.mark.slow
@pytest.mark.parametrize("moves", [0, 1])
@pytest.mark.parametrize("forge", FORGED)
def test_forged_bookkeeping_moves_deletes_and_publishes_nothing_of_others(
    forge, moves, tmp_path, foreign
):
    log, out = write(tmp_path / "log", *(call(f"a/{i}", 5) for i in range(3))), tmp_path / "out"
    killed(log, out, moves)
    forge(out / ".converting", foreign)
    before = {path.name: path.read_bytes() for path in foreign.iterdir()}
    rules = []
    with suppress_rollout_error(rules):
        convert([log], out, **CHOICES, chunk_bytes=1)
    shards = sorted(out.glob("*.parquet"))
    found = [rollout_io.read(shard)["trajectory_id"].to_pylist() for shard in shards]
    refused = moves and rules == ["out_is_free"] and found == [["a_0"]]
    assert refused or (not rules and found == [["a_0"], ["a_1"], ["a_2"]])
    assert {path.name: path.read_bytes() for path in foreign.iterdir()} == before


@pytest.mark.slow
def test_a_conversion_killed_before_it_published_yields_to_another_one(tmp_path):
    log, out = write(tmp_path / "log", *(call(f"a/{i}", 5) for i in range(3))), tmp_path / "out"
    killed(log, out, 0)
    other = write(tmp_path / "other", *(call(f"b/{i}", 5) for i in range(5)))
    convert([other], out, **CHOICES, chunk_bytes=1)
    assert rollout_io.read(out)["instance_id"].to_pylist() == ["b"] * 5
    assert not (out / ".converting").exists()


@pytest.mark.slow
def test_a_publication_that_was_killed_is_completed_but_replaces_nothing(tmp_path):
    log, out = write(tmp_path / "log", *(call(f"a/{i}", 5) for i in range(3))), tmp_path / "out"
    killed(log, out, 1)
    theirs = out / "part-00001.parquet"
    theirs.write_bytes(b"theirs")
    assert refusal([log], out, **CHOICES, chunk_bytes=1).rule == "out_is_free"
    assert theirs.read_bytes() == b"theirs"
    theirs.unlink()
    assert convert([log], out, **CHOICES, chunk_bytes=1).num_resumed == 3
    assert rollout_io.read(out).num_rows == 3


def test_a_link_in_place_of_the_staging_directory_is_refused(tmp_path, foreign):
    log, out = write(tmp_path / "log", call("a/0")), tmp_path / "out"
    out.mkdir()
    (out / ".converting").symlink_to(foreign)
    before = sorted(foreign.iterdir())
    assert refusal([log], out, **CHOICES).rule == "out_is_free"
    assert sorted(foreign.iterdir()) == before
    assert Staging(out).out.path == str(out)


def other_shard(given):
    """A shard of another dataset."""
    other = given["ds"].parent / "zs"
    convert([write(given["ds"].parent / "other", call("z/0", 5))], other, **CHOICES)
    return other / "part-00000.parquet"


def same_size_and_time(given):
    """A shard that only inode and status time tell from the source's."""
    other = given["ds"].parent / "forged"
    shutil.copy2(given["ds"] / "part-00000.parquet", other)
    return other


@pytest.mark.slow
@pytest.mark.parametrize("made", [other_shard, same_size_and_time])
@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "convert"])
def test_a_source_that_is_replaced_during_a_read_is_refused(verb, made, given, monkeypatch, capsys):
    """It is replaced at the last moment, after everything was read."""
    other, check, num_checks = made(given), Sources.refuse_changed, [0]

    def replaced(self):
        num_checks[0] += 1
        # An export checks once more before it writes: nothing may change while it validates.
        if num_checks[0] == (2 if "export" in VERBS[verb] else 1):
            other.replace(given["ds"] / "part-00000.parquet")
        check(self)

    monkeypatch.setattr(Sources, "refuse_changed", replaced)
    code, said = run(command(verb, given)), capsys.readouterr().err
    assert code == 1
    assert "while it was read. [input_file]" in said
    assert not list(Path(given["out"]).glob("*.parquet"))
    assert not given["out"].is_file()


def test_a_reader_goes_on_when_only_the_mode_or_the_links_of_a_file_change(given):
    shard = given["ds"] / "part-00000.parquet"
    reader = RowReader(given["ds"])
    shard.chmod(0o600)
    (given["ds"].parent / "backup").hardlink_to(shard)
    assert reader.rows(0, 3, ["trajectory_id"]).num_rows == 3
    same_size_and_time(given).replace(shard)
    with pytest.raises(RolloutError, match="input_file"):
        reader.rows(0, 3, ["step_index"])


def test_text_that_is_not_utf_8_is_refused_by_name(given, capsys):
    import pyarrow.parquet as pq

    shard = given["ds"] / "part-00000.parquet"
    table = pq.read_table(shard).replace_schema_metadata(None)
    bad = pa.array([b"fine", b"\xff\xfe", b"fine"]).view(pa.string())
    nested = pa.ListArray.from_arrays([0, 1, 2, 3], bad)
    for name, column in (("mine", bad), ("mine", nested), ("agent", bad)):
        kept = table.drop_columns([n for n in table.column_names if n == name])
        pq.write_table(kept.append_column(name, column), shard)
        for verb in ("filter", "merge", "undo", "hf"):
            assert run(command(verb, given)) == 1
        for line in (["validate"], ["stats"], ["inspect"]):
            assert run([*line, str(given["ds"])]) == 1, line
        said = capsys.readouterr()
        assert f"column {name} is not UTF-8" in said.err + said.out
        assert "Traceback" not in said.err
        assert "unexpected" not in said.err


def test_a_panic_of_polars_is_an_error_like_any_other(monkeypatch, given, capsys):
    import polars as pl

    def panics(*_arguments):
        raise pl.exceptions.PanicException("called `Result::unwrap()`")

    monkeypatch.setattr("rollout_io.dataset.checking._breaches", panics)
    assert run(["filter", str(given["ds"]), "--drop-failed", "--dry-run"]) == 2
    assert "unexpected PanicException" in capsys.readouterr().err
