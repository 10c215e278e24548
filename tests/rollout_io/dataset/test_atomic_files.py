import os

import pytest

from rollout_io.dataset.filesystems import replace_text, whole


def test_a_file_is_replaced_whole_and_synced_before_its_name(tmp_path, monkeypatch):
    path = tmp_path / "latest"
    path.write_text("old")
    happened = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda handle: (happened.append(os.fstat(handle).st_ino), fsync(handle))
    )
    monkeypatch.setattr(os, "replace", lambda *paths: (happened.append("renamed"), replace(*paths)))
    replace_text(path, "new")
    assert path.read_text() == "new"
    assert happened == [path.stat().st_ino, "renamed", tmp_path.stat().st_ino]
    assert [p.name for p in tmp_path.iterdir()] == ["latest"]


def test_a_folder_takes_its_name_with_all_that_is_in_it(tmp_path):
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "junk").touch()
    with whole(tmp_path / "out") as partial:
        (partial / "data").mkdir(parents=True)
        (partial / "data" / "a").write_text("a")
        assert not (tmp_path / "out").exists()
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "data", "out"]


@pytest.mark.parametrize("is_folder", [True, False])
def test_an_error_leaves_what_was_there(tmp_path, is_folder):
    path = tmp_path / "out"
    path.write_text("old")

    def fill():
        with whole(path) as partial:
            if is_folder:
                (partial / "data").mkdir(parents=True)
            else:
                partial.write_text("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
