"""A tokenizer is a directory, or a Hub id in the local cache; datasets remember theirs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rollout_io
from pipelines.view.sources import Sources
from pipelines.view.tokenizers import Tokenizers
from rollout_io import convert
from rollout_io.cli.main import run
from rollout_io.conversion import driver
from rollout_io.conversion.plan import Keywords
from rollout_io.retokenize.local import find_tokenizer, tokenizer_directory
from schemas.errors import RolloutError
from schemas.metadata import DatasetMetadata
from tests.helpers.conversion_helpers import SHOP, refusal, write

pytestmark = pytest.mark.slow

NAME = "acme/tiny-instruct"
CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


@pytest.fixture
def hub(tmp_path, monkeypatch, smollm2_dir):
    """A Hugging Face cache with SmolLM2's tokenizer under a different name."""
    import huggingface_hub.constants as constants

    cache = tmp_path / "hub"
    repo = cache / f"models--{NAME.replace('/', '--')}"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        if (smollm2_dir / name).exists():
            shutil.copy(smollm2_dir / name, snapshot)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return snapshot


@pytest.fixture
def text(tmp_path):
    return write(tmp_path / "text.jsonl", {"id": "a", "messages": CHAT})


@pytest.mark.usefixtures("hub")
def test_a_name_is_looked_up_in_the_local_cache_and_remembered(text, tmp_path, capsys):
    out = tmp_path / "ds"
    arguments = ["convert", str(text), "--tokenizer", NAME, "--out", str(out)]
    assert run(arguments) == 0
    metadata = rollout_io.read_metadata(out)
    assert (metadata.tokenizer, metadata.vocab_size) == (NAME, 49152)
    assert metadata.tokenizer_fingerprint is not None
    capsys.readouterr()
    assert run(arguments) == 0
    assert "nothing to do" in capsys.readouterr().err
    for verb in ("inspect", "drift"):
        assert run([verb, str(out), "--tokenizer", NAME]) == 0
    capsys.readouterr()


@pytest.mark.usefixtures("hub")
def test_exact_ids_are_verified_against_a_named_tokenizer(tmp_path):
    convert(SHOP, tmp_path / "ds", tokenizer=NAME)
    assert rollout_io.read_metadata(tmp_path / "ds").tokenizer_fingerprint is not None


@pytest.mark.usefixtures("hub")
def test_a_name_that_is_not_here_is_an_error_with_the_command_that_fetches_it(text, tmp_path):
    error = refusal(text, tmp_path / "ds", tokenizer="acme/other")
    assert (error.rule, error.where) == ("tokenizer", "acme/other")
    assert "neither a directory nor a model in the local Hugging Face cache" in error.sentence
    assert error.hint.startswith("download it: hf download acme/other ")
    assert find_tokenizer("no such/name at all/x") is None
    assert find_tokenizer(None) is None


def test_a_missing_relative_path_is_reported_with_the_places_that_were_searched():
    metadata = DatasetMetadata(tokenizer="models/qwen", tokenizer_fingerprint="f")
    searched = "(looked in the current directory and the Hugging Face cache)"
    missing = "the tokenizer models/qwen is not on this machine"
    assert Tokenizers().find(metadata, None).reason == f"{missing} {searched}"
    absolute = metadata.replace(tokenizer="/models/qwen")
    assert Tokenizers().find(absolute, None).reason.endswith("/qwen is not on this machine")


def test_inspect_decodes_with_the_tokenizer_of_the_dataset(hub, tmp_path, capsys):
    convert(SHOP, tmp_path / "ds", tokenizer=NAME)
    convert(SHOP, tmp_path / "plain")
    shown = {}
    for name, arguments in {"ds": [], "plain": [], "told": ["--tokenizer", NAME]}.items():
        dataset = tmp_path / ("ds" if name == "ds" else "plain")
        assert run(["inspect", str(dataset), "--limit", "1", "--json", *arguments]) == 0
        shown[name] = json.loads(capsys.readouterr().out)
    assert shown["ds"] == shown["told"] != shown["plain"]
    file = hub / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"][0]["content"] = "<|changed|>"
    file.write_text(json.dumps(content))
    assert run(["inspect", str(tmp_path / "ds"), "--limit", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == shown["plain"]


@pytest.fixture
def unusable(tmp_path):
    """Paths that are no tokenizer, with what is said of each."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    return {
        "empty": "the directory contains no tokenizer",
        "none": "the tokenizer directory does not exist",
        "file": "the path is not a directory",
    }


@pytest.mark.parametrize("name", ["empty", "none", "file"])
@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_a_path_without_a_tokenizer_is_one_error_before_any_log_is_read(
    name, on_error, unusable, tmp_path, monkeypatch
):
    monkeypatch.setattr(driver, "open_log", pytest.fail)
    choices = Keywords(tokenizer=str(tmp_path / name), on_error=on_error)
    with pytest.raises(RolloutError) as caught:
        convert([tmp_path / "no.jsonl"], tmp_path / "ds", **choices)
    assert (caught.value.rule, caught.value.where) == ("tokenizer", str(tmp_path / name))
    assert unusable[name] in caught.value.sentence
    assert caught.value.hint.startswith("pass the directory of ")
    assert not (tmp_path / "ds").exists()


@pytest.mark.parametrize("name", ["acme/other", "other", "models/other"])
@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_a_name_that_is_not_here_is_refused_before_exact_ids_are_read(
    name, on_error, tmp_path, monkeypatch
):
    monkeypatch.setattr(driver, "open_log", pytest.fail)
    error = refusal(SHOP, tmp_path / "ds", tokenizer=name, on_error=on_error)
    assert (error.rule, error.where) == ("tokenizer", name)
    assert error.hint.startswith(f"download it: hf download {name} ")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("smollm2", ".cache/smollm2"),
        ("smolm2", None),
        (".cache/smolm2", ".cache/smollm2"),
        ("models/tiny-3", "models/tiny-2"),
        ("models/smollm2", None),
        ("empty", None),
    ],
)
def test_a_mistyped_directory_is_answered_with_the_one_meant(name, meant, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for directory in (".cache/smollm2", "models/tiny-2", "models/tiny-4x", ".cache/empty"):
        Path(directory).mkdir(parents=True)
        if directory != ".cache/empty":
            Path(directory, "tokenizer.json").touch()
    with pytest.raises(RolloutError) as caught:
        tokenizer_directory(name)
    hint = caught.value.hint
    assert (hint == f"did you mean {meant}?") if meant else hint.startswith("download it: ")


@pytest.mark.parametrize("verb", ["inspect", "drift", "view"])
def test_a_tokenizer_other_than_the_datasets_is_warned_about(verb, hub, tmp_path, capsys):
    convert(SHOP, tmp_path / "ds", tokenizer=NAME)
    other = shutil.copytree(hub, tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    content["added_tokens"][0]["content"] = "<|changed|>"
    (other / "tokenizer.json").write_text(json.dumps(content))
    warnings = {}
    for tokenizer in (NAME, str(other)):
        arguments = [str(tmp_path / "ds"), "--tokenizer", tokenizer]
        if verb == "view":
            warnings[tokenizer] = " ".join(Sources.open(arguments[:1], tokenizer).warnings)
        else:
            assert run([verb, *arguments]) == 0
            warnings[tokenizer] = capsys.readouterr().err
    warning = f"{other} is not the tokenizer of the dataset ({NAME}): decoded text may be wrong"
    assert warning in warnings[str(other)]
    assert "is not the tokenizer" not in warnings[NAME]


@pytest.mark.parametrize("verb", ["convert", "drift", "inspect"])
@pytest.mark.parametrize("name", ["empty", "none"])
def test_a_path_without_a_tokenizer_is_refused_without_loading_transformers(
    verb, name, unusable, tmp_path
):
    convert(SHOP, tmp_path / "ds")
    arguments = [verb, str(tmp_path / "ds"), "--tokenizer", str(tmp_path / name)]
    arguments += ["--out", str(tmp_path / "out")] if verb == "convert" else []
    script = "import sys\nfrom rollout_io.cli.main import run\nstatus = run(sys.argv[1:])\n"
    script += "assert 'transformers' not in sys.modules\nsys.exit(status)"
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert unusable[name] in done.stderr
    assert "Hint: pass the directory of a downloaded model" in done.stderr
