"""The local filesystem answers as fsspec's does, without importing it."""

import fsspec
import pytest

from rollout_io.dataset.filesystems import LocalFiles, local_path
from rollout_io.dataset.storage import Location

PATHS = (
    "a",
    "./a",
    ".",
    "a/",
    "a/../b",
    "/",
    "/a//",
    "~",
    "~/a",
    "~nobody/a",
    "file:///a/b",
    "file://a",
)
OTHER = ("memory://a", "simplecache::file:///a", "data:,a", "file:a", "local:///a")


@pytest.mark.parametrize("path", PATHS)
def test_a_local_path_is_resolved_as_fsspec_does(path):
    assert local_path(path) == fsspec.core.url_to_fs(path)[1]


@pytest.mark.parametrize("url", OTHER)
def test_other_urls_are_left_to_fsspec(url):
    assert local_path(url) is None


@pytest.mark.parametrize("url", ["file:/a", "local:///a"])
def test_every_url_of_a_local_file_is_local(url):
    assert Location.of(url) == Location(LocalFiles(), "/a")


def test_the_local_filesystem_answers_as_that_of_fsspec(tmp_path):
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "broken").symlink_to("nothing")
    ours, known = LocalFiles(), fsspec.filesystem("file")
    for name in ("folder", "file", "link", "broken", "absent"):
        path = str(tmp_path / name)
        for question in ("exists", "isfile", "isdir", "unstrip_protocol"):
            assert getattr(ours, question)(path) == getattr(known, question)(path), (question, name)
    for path in map(str, (tmp_path, tmp_path / "folder", tmp_path / "file")):
        assert sorted(ours.ls(path, detail=False)) == sorted(known.ls(path, detail=False))
        assert ours.find(path) == known.find(path)
    assert ours.size(str(tmp_path / "link")) == known.size(str(tmp_path / "link")) == 5
    assert ours.head(str(tmp_path / "file"), 2) == b"12"
    with pytest.raises(FileNotFoundError):
        ours.ls(str(tmp_path / "absent"))


def test_removing_a_link_leaves_its_target(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    LocalFiles().rm(str(tmp_path / "link"), recursive=True)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
