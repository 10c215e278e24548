"""Inputs that are named by a pattern, or lie on a remote filesystem."""

import gzip

import fsspec
import pytest

import rollout_io
from rollout_io import convert
from rollout_io.cli.main import run
from tests.helpers.conversion_helpers import call, refusal, write


@pytest.fixture
def logs(tmp_path):
    """Two logs and notes, one of the logs in a directory."""
    folder = tmp_path / "logs"
    write(folder / "a10.jsonl", call("a/0"))
    write(folder / "a9.jsonl", call("b/0"))
    write(folder / "deep" / "c.jsonl", call("c/0"))
    (folder / "notes.jsonl").write_text("# notes")
    return folder


def instances(dataset):
    return rollout_io.read(dataset)["instance_id"].to_pylist()


def test_a_pattern_stands_for_its_files_in_natural_order_and_foreign_ones_are_left(
    logs, tmp_path, capsys
):
    out = tmp_path / "ds"
    assert run(["convert", f"{logs}/*.jsonl", "--out", str(out)]) == 0
    names = [f"{logs}/{name}.jsonl" for name in ("a9", "a10")]
    assert rollout_io.read_metadata(out).made_by[0]["inputs"] == names
    assert "2 sessions (calls); skipped 1 other file\n" in capsys.readouterr().err
    assert convert([f"{logs}/*.jsonl"], out).was_done


@pytest.mark.parametrize("pattern", ["**/*.jsonl", "**", "*"])
def test_a_pattern_of_any_depth_finds_each_file_once(pattern, logs, tmp_path):
    convert(f"{logs}/{pattern}", tmp_path / "ds")
    assert instances(tmp_path / "ds") == ["a", "b", "c"]


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(logs, tmp_path):
    log = write(logs / "[ab]*.jsonl", call("odd/0"))
    convert(log, tmp_path / "ds")
    assert instances(tmp_path / "ds") == ["odd"]


def test_a_pattern_without_a_match_is_an_error_that_says_so(tmp_path, capsys):
    pattern = f"{tmp_path}/*.log"
    assert run(["convert", pattern, "--out", str(tmp_path / "ds")]) == 1
    said = capsys.readouterr().err
    assert f"Error: {pattern}: no file matches the pattern. [input_file]" in said
    assert not (tmp_path / "ds").exists()


@pytest.mark.slow
def test_urls_are_files_directories_and_patterns_packed_or_not(logs, tmp_path):
    fs = fsspec.filesystem("memory")
    root = f"/{tmp_path.name}"
    fs.pipe(f"{root}/a.jsonl.gz", gzip.compress((logs / "a9.jsonl").read_bytes()))
    fs.pipe(f"{root}/b.jsonl", (logs / "a10.jsonl").read_bytes())
    fs.pipe(f"{root}/README.md", b"# Notes")
    url = f"memory:/{root}"
    for name, inputs, left in (
        ("one", f"{url}/a.jsonl.gz", 0),
        ("two", [f"{url}/a.jsonl.gz", f"{url}/b.jsonl"], 0),
        ("all", url, 1),
        ("some", f"{url}/*.jsonl*", 0),
    ):
        done = convert(inputs, tmp_path / name)
        assert instances(tmp_path / name) == (["b"] if name == "one" else ["a", "b"])
        assert len(done.left) == left
        assert convert(inputs, tmp_path / name).was_done
    assert rollout_io.read(tmp_path / "one")["source"].to_pylist() == [f"{url}/a.jsonl.gz:1"]
    for missing in (f"{url}/none.jsonl", f"{url}/*.none"):
        assert refusal(missing, tmp_path / "ds").rule == "input_file"


def test_a_filesystem_whose_package_is_missing_names_it(tmp_path, monkeypatch):
    resolve = fsspec.core.url_to_fs

    def missing(path, **options):
        if path.startswith("s3:"):
            raise ImportError("Install s3fs to access S3")
        return resolve(path, **options)

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    error = refusal("s3://bucket/a.jsonl", tmp_path / "ds")
    assert (error.rule, error.hint) == ("filesystem", "pip install s3fs")
    assert "s3:// needs a package that is not installed" in error.sentence
    monkeypatch.undo()
    error = refusal("nowhere://a.jsonl", tmp_path / "ds")
    assert (error.rule, error.hint) == ("filesystem", "check the URL")
