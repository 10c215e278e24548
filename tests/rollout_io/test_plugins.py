"""Entry points that are read without importlib.metadata are those it finds, in its order."""

import os
import shutil
import sys
import zipfile
from importlib.metadata import entry_points

import pytest

from rollout_io.formats.detect import load_formats
from rollout_io.formats.exports import FORMATS, export, formats
from rollout_io.plugins import Plugin, plugins
from schemas.errors import InputError

GROUPS = ("rollout_io.verbs", "rollout_io.formats", "console_scripts", "pytest11", "none")


def install(folder, package, text, suffix="dist-info"):
    path = folder / f"{package}.{suffix}"
    path.mkdir(parents=True)
    (path / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package.partition('-')[0]}\n")
    (path / "entry_points.txt").write_text(text)


def check(*groups):
    for group in groups:
        expected = [Plugin(entry.name, entry.value) for entry in entry_points(group=group)]
        assert plugins(group) == expected


def test_the_installed_packages_register_what_importlib_finds():
    check(*GROUPS)
    assert len(plugins("rollout_io.verbs")) >= 17
    assert len(plugins("console_scripts")) > 17


def test_the_first_package_of_a_name_hides_others(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path / name) for name in ("a", "b", "gone")])
    install(tmp_path / "a", "My.Verbs-1.0", "[g]\nfirst = os:path\n")
    install(tmp_path / "b", "my_verbs-2.0", "[g]\nsecond = os:path\n")
    install(tmp_path / "b", "my__other-2.0", "[g]\nthird = os:path\n", "egg-info")
    install(tmp_path / "b", "bare", "[g]\nfourth = os\n", "egg-info")
    (tmp_path / "b" / "file.egg-info").write_text("Name: file\n")
    (tmp_path / "b" / "no_metadata").mkdir()
    check("g", "h")
    assert sorted(found.name for found in plugins("g")) == ["first", "fourth", "third"]


def test_comments_blanks_and_extras_are_read_as_importlib_reads_them(tmp_path, monkeypatch):
    text = (
        "# [g]\nno = a:b\n[ g ]\n[g]\n\n  # x = y\n x=os : path.join  [more, extras]\n[h]\ny = os\n"
    )
    install(tmp_path, "odd-1", text)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    check("g", "h", " g ")
    (x,), (y,) = plugins("g"), plugins("h")
    assert (x.module, y.module) == ("os", "os")
    assert x.load() is os.path.join
    assert y.load() is os


@pytest.mark.parametrize("kind", ["archive", "egg", "hook"])
def test_packages_outside_directories_are_found_too(kind, tmp_path, monkeypatch):
    text = "[g]\nfound = os:path\n"
    paths = [str(tmp_path)]
    if kind == "archive":
        with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
            archive.writestr("inside-1.dist-info/entry_points.txt", text)
            archive.writestr("inside-1.dist-info/METADATA", "Name: inside\n")
        paths = [str(tmp_path / "all.zip")]
    elif kind == "egg":
        (tmp_path / "inside.egg" / "EGG-INFO").mkdir(parents=True)
        (tmp_path / "inside.egg" / "EGG-INFO" / "entry_points.txt").write_text(text)
        (tmp_path / "inside.egg" / "EGG-INFO" / "PKG-INFO").write_text("Name: inside\n")
        paths = [str(tmp_path / "inside.egg")]
    else:
        install(tmp_path / "elsewhere", "inside-1", text)

        class Hook:
            def find_spec(self, *_):
                return None

            def find_distributions(self, _):
                from importlib.metadata import PathDistribution

                yield PathDistribution(tmp_path / "elsewhere" / "inside-1.dist-info")

        monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Hook()])
    monkeypatch.setattr(sys, "path", paths)
    check("g")
    assert plugins("g") == [Plugin("found", "os:path")]


def test_packages_that_are_installed_or_removed_meanwhile_are_noticed(tmp_path, monkeypatch):
    def later():
        """Without waiting for the clock of the file system, which ticks every few milliseconds."""
        os.utime(tmp_path, ns=(0, tmp_path.stat().st_mtime_ns + 10_000_000))

    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert plugins("g") == []
    install(tmp_path, "new-1", "[g]\nfound = os:path\n")
    later()
    assert plugins("g") == [Plugin("found", "os:path")]
    shutil.rmtree(tmp_path / "new-1.dist-info")
    later()
    assert plugins("g") == []


def test_a_plugin_that_ends_the_process_or_fails_is_named_and_takes_nothing_down(
    tmp_path, monkeypatch
):
    (tmp_path / "ends_it.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "fails_it.py").write_text("raise ValueError('no config')\n")
    text = "[rollout_io.formats]\nending = ends_it:F\n[rollout_io.exports]\n"
    install(tmp_path, "odd-1", text + "broken = fails_it:F\nending = ends_it:F\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    found = load_formats()
    assert list(found.failures) == ["ending"]
    assert "sys.exit(3)" in found.failures["ending"]
    assert set(FORMATS) < set(formats())
    for name, reason in (("broken", "ValueError: no config"), ("ending", "sys.exit(3)")):
        with pytest.raises(InputError) as caught:
            export("ds", "out", name)
        assert (caught.value.rule, reason in caught.value.got) == ("format_loads", True)
