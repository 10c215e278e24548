"""The extras: what docs/install.md says each verb needs is what the code asks for."""

import ast
import re
import subprocess
import sys
import tomllib

import pytest

from tests.conftest import EXAMPLES, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
VERBS = PROJECT["entry-points"]["rollout_io.verbs"]
ROWS = dict(
    re.findall(
        r"^\| `?([a-z]+)`? \| (.+) \|$", (ROOT / "docs" / "install.md").read_text(), re.MULTILINE
    )
)
FOR_VERBS = ("text", "train", "generate", "record", "plot", "view", "all")

WITHOUT = """
import sys
names = {names!r}
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in names:
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Missing())
from rollout_io.cli.main import run
for command in {commands!r}:
    print(repr(command), run(command), file=sys.stderr, flush=True)
"""
MODULES = {"bitsandbytes": "bitsandbytes", "prometheus-client": "prometheus_client"}


def packages(extra):
    """The packages that an extra installs, with those of the extras in it."""
    found = set()
    for line in EXTRAS[extra]:
        name, _, inner = re.split(r"[>=]", line)[0].partition("[")
        if name == "rollout-io":
            found |= set().union(*(packages(one) for one in inner.rstrip("]").split(",")))
        else:
            found.add(name)
    return found


OPTIONAL = {name.replace("-", "_") for extra in ("all", "demo") for name in packages(extra)}
OPTIONAL -= {"jinja2", "safetensors"}  # other required packages may import them


def without_optional(commands, folder):
    """Exit code of each command and what it printed to stderr, in one process."""
    code = WITHOUT.format(names=OPTIONAL, commands=commands)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    )
    found, rest = [], done.stderr
    for command in commands:
        said, rest = rest.split(f"{command!r} ", 1)
        exit_code, rest = rest.split("\n", 1)
        found.append((int(exit_code), said))
    return found


def named(text):
    return [word for word in re.findall(r"`([a-z]+)`", text) if word in VERBS]


def test_the_table_has_every_extra_and_every_verb():
    assert [name for name in ROWS if name in FOR_VERBS] == list(FOR_VERBS)
    in_table = {verb for row in ("none", *FOR_VERBS) for verb in named(ROWS[row])}
    assert in_table == set(VERBS)
    assert (
        "not in `all`" in ROWS["vllm"]
    )  # it needs a version of torch and a GPU, or other packages
    others = set(EXTRAS) - {"testing", "demo", "dev", "vllm"} - set(FOR_VERBS)
    assert all(f"`{extra}`" in ROWS["all"] for extra in others)
    assert packages("all") == {p for extra in (*others, *FOR_VERBS[:-1]) for p in packages(extra)}


@pytest.mark.slow
def test_every_extra_that_an_error_names_exists():
    asked = set()
    for file in (
        f for name in ("rollout_io", "pipelines", "trainer") for f in (ROOT / name).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "requires_extra":
                first = node.args[0]
                asked |= set(first.value.split(",")) if isinstance(first, ast.Constant) else set()
    assert asked
    assert asked <= set(EXTRAS)


@pytest.mark.slow
def test_verbs_of_the_first_row_need_no_extra(tmp_path):
    (tmp_path / "log.jsonl").write_bytes((EXAMPLES / "shop.calls.jsonl").read_bytes())
    rewards = str(EXAMPLES / "shop.rewards.jsonl")
    commands = [
        ["convert", "log.jsonl", "--rewards", rewards, "-o", "ds"],
        ["merge", "ds", "-o", "merged"],
        ["merge", "--undo", "merged", "-o", "steps"],
        ["filter", "ds", "--max-steps", "5", "-o", "few"],
        ["diff", "ds", "few"],
        ["rescore", "ds", "--reward", "builtins:id", "--name", "id"],
        *([verb, "ds"] for verb in ("validate", "inspect", "stats", "drift")),
        *(["export", "ds", "--format", one, "-o", one] for one in ("skyrl", "trl", "verl")),
        ["formats"],
        ["formats", "--templates"],
    ]
    assert {command[0] for command in commands} == set(named(ROWS["none"]))
    for command, (exit_code, said) in zip(
        commands, without_optional(commands, tmp_path), strict=True
    ):
        assert exit_code == 0, (command, said)


NEEDS = {
    "train ds --model m -o run": "train",
    "rl rl.toml -o run": "train",
    "plot run": "plot",
    "view ds --no-browser": "view",
    "record --upstream http://127.0.0.1:9/v1 -o new": "record",
    "convert text.jsonl --tokenizer m -o new": "text",
    "drift ds --tokenizer m": "text",
    "inspect ds --tokenizer m": "text",
    "export ds --format slime -o new.pt": "train",
    "validate ds --engine ray": "ray",
}


@pytest.mark.slow
def test_an_error_names_the_extra_of_the_table(tmp_path):
    (tmp_path / "m").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "m" / name).write_text("{}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"global_step": 1, "return_mean": 0.5}\n')
    (tmp_path / "rl.toml").write_text(
        '[model]\npath = "m"\n[loop]\ntasks = "t.jsonl"\nnum_iterations = 1\n'
        '[generate]\nenvironment = "gsm8k"\ngroup_size = 4\n'
    )
    log = (EXAMPLES / "shop.calls.jsonl").read_text()
    text = log.replace("prompt_token_ids", "no_ids").replace("token_ids", "no_token_ids")
    (tmp_path / "log.jsonl").write_text(log)
    (tmp_path / "text.jsonl").write_text(text)
    commands = [["convert", "log.jsonl", "-o", "ds", "-q"], *map(str.split, NEEDS)]
    converted, *found = without_optional(commands, tmp_path)
    assert converted == (0, "")
    for (command, extra), (exit_code, said) in zip(NEEDS.items(), found, strict=True):
        assert exit_code == 1, (command, said)
        assert "[extra_installed]" in said, (command, said)
        assert f'Hint: pip install "rollout-io[{extra}]"' in said, (command, said)
