"""Modules that each verb may import: on tiny data, a verb spends nearly all of its time on imports."""

import json
import os
import subprocess
import sys

import pytest

from rollout_io.cli.main import run
from rollout_io.startup import keeps_torch_out_of_transformers
from tests.conftest import EXAMPLES, ROOT

SHOP = EXAMPLES / "shop.calls.jsonl"
SHOP_REWARDS = EXAMPLES / "shop.rewards.jsonl"

HEAVY = (
    *("torch", "transformers", "tokenizers", "datasets", "matplotlib", "ray", "jinja2", "pandas"),
    *("rich", "fsspec", "pyarrow.dataset", "multiprocessing.connection"),
)
"""Modules that no verb needs on a small local dataset, without a tokenizer or a terminal."""
LIGHT = ("polars", "pyarrow", "numpy", "msgspec", "difflib", *HEAVY)
"""Modules that help does not need."""
DATASET_VERBS = [
    ["validate"],
    ["inspect"],
    ["filter", "--where", "reward >= 0", "--out", "fewer"],
    ["merge", "--out", "merged"],
    ["merge", "--undo", "merged", "--out", "apart"],
    ["drift"],
    *(
        ["export", "--format", name, "--out", name]
        for name in ("skyrl", "trl", "verl", "parquet", "sft", "sft_tokens", "dpo", "kto")
    ),
    ["stats", "--all"],
    ["stats"],
]


def imported(folder, names, *commands):
    """The modules that each command imports first, by command, one after the other in a process."""
    code = (
        "import json, sys; from rollout_io.cli.main import run\n"
        "names, *commands = json.loads(sys.argv[1])\n"
        "new, before = {}, set()\n"
        "for command in commands:\n"
        "    assert run(command) == 0, command\n"
        "    new[' '.join(command)] = [n for n in names if n not in before and sys.modules.get(n)]\n"
        "    before = {*sys.modules}\n"
        "print(json.dumps({command: names for command, names in new.items() if names}))"
    )
    arguments = [sys.executable, "-c", code, json.dumps([names, *commands])]
    how = {"cwd": folder, "env": os.environ | {"PYTHONPATH": str(ROOT)}, "text": True}
    done = subprocess.run(arguments, **how, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    out = str(tmp_path_factory.mktemp("shop") / "ds")
    assert run(["convert", str(SHOP), "--rewards", str(SHOP_REWARDS), "--out", out]) == 0
    return out


def test_a_verb_on_a_dataset_imports_no_heavy_library(shop, tmp_path):
    commands = [
        [verb, *([] if "--undo" in options else [shop]), *options]
        for verb, *options in DATASET_VERBS
    ]
    drawn = {f"stats {shop}": ["rich"]}  # it prints rich's tables
    assert imported(tmp_path, HEAVY, *commands) == drawn


@pytest.mark.slow
def test_convert_and_formats_import_no_heavy_library(tmp_path):
    convert = ["convert", str(SHOP), "--rewards", str(SHOP_REWARDS), "--out", "out"]
    assert imported(tmp_path, HEAVY, ["formats"], ["formats", str(SHOP)], convert) == {}


def test_the_help_of_a_verb_imports_no_library_but_click(tmp_path):
    verbs = ("convert", "stats", "export", "view", "record", "plot", "train")
    assert imported(tmp_path, LIGHT, *([verb, "--help"] for verb in verbs)) == {}


def imported_by_the_command(arguments, names):
    """Return which of the modules the installed command imports, and what it prints on stderr."""
    code = (
        "import atexit, sys; from rollout_io.cli.main import main\n"
        "atexit.register(lambda: print([n for n in sys.argv[1].split() if n in sys.modules]))\n"
        "main(sys.argv[2:])"
    )
    command = [sys.executable, "-c", code, " ".join(names), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1], done.stderr


@pytest.mark.slow
def test_the_command_loads_a_tokenizer_without_torch(shop, smollm2_dir, tmp_path):
    names = ["torch", "transformers"]
    drift = ["drift", shop, "--tokenizer", str(smollm2_dir), "--json"]
    assert imported_by_the_command(drift, names) == ("['transformers']", "")
    log = tmp_path / "messages.jsonl"
    messages = [{"role": "user", "content": "1 + 5?"}, {"role": "assistant", "content": "6"}]
    log.write_text(json.dumps({"messages": messages, "instance_id": "sum", "reward": 1.0}))
    convert = ["convert", str(log), "--tokenizer", str(smollm2_dir), "-o", str(tmp_path / "ds")]
    found, said = imported_by_the_command(convert, names)
    assert found == "['transformers']"
    assert "PyTorch" not in said


@pytest.mark.slow
def test_a_program_that_runs_a_verb_can_load_models_afterwards(shop, smollm2_dir):
    assert run(["drift", shop, "--tokenizer", str(smollm2_dir), "--json"]) == 0
    assert not keeps_torch_out_of_transformers()
    assert sys.modules.get("torch", "absent") is not None


@pytest.mark.slow
def test_worker_processes_of_the_command_load_a_tokenizer_without_torch(smollm2_dir):
    code = (
        "import sys; from rollout_io.dataset.parallel import Workers\n"
        "from rollout_io.startup import keep_torch_out_of_transformers\n"
        "from tests.helpers.worker_helpers import imports_torch\n"
        "keep_torch_out_of_transformers() if sys.argv[2] == 'command' else None\n"
        "print(dict(Workers(2).map(imports_torch, [sys.argv[1]])))"
    )
    for program, found in (("command", "{0: False}"), ("library", "{0: True}")):
        command = [sys.executable, "-c", code, str(smollm2_dir), program]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.stdout.strip() == found, done.stderr
