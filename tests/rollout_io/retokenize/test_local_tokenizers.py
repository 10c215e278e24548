"""A tokenizer is a directory, or a Hub id in the local cache; datasets remember theirs."""

import json
import shutil

import pytest

import rollout_io
from rollout_io import Choices, convert
from rollout_io.cli.main import run
from rollout_io.retokenize.local import find_tokenizer
from tests.helpers.conversion_helpers import SHOP, refusal, write

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
    convert(SHOP, tmp_path / "ds", Choices(tokenizer=NAME))
    assert rollout_io.read_metadata(tmp_path / "ds").tokenizer_fingerprint is not None


@pytest.mark.usefixtures("hub")
def test_a_name_that_is_not_here_is_an_error_with_the_command_that_fetches_it(text, tmp_path):
    error = refusal(text, tmp_path / "ds", Choices(tokenizer="acme/other"))
    assert (error.rule, error.where) == ("tokenizer", "acme/other")
    assert "neither a directory nor a model in the local Hugging Face cache" in error.sentence
    assert error.hint.startswith("download it: hf download acme/other ")
    assert find_tokenizer("no such/name at all/x") is None
    assert find_tokenizer(None) is None


def test_inspect_decodes_with_the_tokenizer_of_the_dataset(hub, tmp_path, capsys):
    convert(SHOP, tmp_path / "ds", Choices(tokenizer=NAME))
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
