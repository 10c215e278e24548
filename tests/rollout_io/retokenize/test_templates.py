"""The chat templates that come with the package, as files for other programs."""

import json
from pathlib import Path

import pytest

from rollout_io.cli.main import run
from rollout_io.retokenize.chat_template import MAX_TEMPLATE_BYTES, TEMPLATES, find_template
from schemas.errors import RolloutError

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_verb_prints_the_path_of_a_template_and_nothing_else(capsys, name):
    assert run(["formats", "--templates", name]) == 0
    printed = capsys.readouterr()
    assert Path(printed.out.removesuffix("\n")).read_text(encoding="utf-8") == find_template(name)
    assert printed.err == ""


def test_the_verb_lists_the_templates(capsys):
    assert run(["formats", "--templates"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0].strip() for line in lines] == list(TEMPLATES)
    assert run(["formats", "--templates", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {entry["name"]: entry["summary"] for entry in listed} == TEMPLATES
    assert all(Path(entry["path"]).is_file() for entry in listed)


def test_a_name_that_is_none_of_them_is_refused_with_the_nearest(capsys):
    assert run(["formats", "--templates", "qwen3_acc_thinkin"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "no template has this name" in printed.err
    assert "did you mean qwen3_acc_thinking?" in printed.err


def test_every_template_is_listed_that_is_there():
    folder = Path(find_template.__code__.co_filename).with_name("templates")
    assert {path.stem for path in folder.iterdir()} == set(TEMPLATES)


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (
            b"a" * (MAX_TEMPLATE_BYTES - 1) + "\u00e9\u00e9".encode(),
            "the file is larger than 1,000,000 bytes",
        ),
        (b"caf\xe9", "the file is not UTF-8"),
    ],
)
def test_a_file_that_is_no_template_is_refused_for_its_own_reason(content, got, tmp_path):
    (tmp_path / "chat.jinja").write_bytes(content)
    with pytest.raises(RolloutError, match=got):
        find_template(str(tmp_path / "chat.jinja"))
