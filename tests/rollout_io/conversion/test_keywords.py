"""The keywords of `convert` and `read_log`: what the command takes, from Python."""

import inspect

import click
import pytest

import rollout_io
from rollout_io.cli.convert import convert as command
from rollout_io.conversion.plan import Keywords
from schemas.errors import ConfigError
from tests.conftest import EXAMPLES

SHOP, REWARDS = EXAMPLES / "shop.calls.jsonl", EXAMPLES / "shop.rewards.jsonl"
OF_THE_COMMAND = {"inputs", "out", "workers", "engine", "redacts", "as_json"}


def test_the_command_and_python_take_the_same_options():
    names = {param.name for param in command.params if not param.is_eager}
    assert names - OF_THE_COMMAND == set(Keywords.__annotations__)


def test_no_public_function_takes_an_object_of_choices():
    assert not hasattr(rollout_io, "Choices")
    for function in (rollout_io.convert, rollout_io.read_log):
        assert "choices" not in inspect.signature(function).parameters


def test_paths_and_texts_are_taken_alike(tmp_path):
    by_path = rollout_io.read_log(SHOP, rewards=REWARDS)
    assert by_path.equals(rollout_io.read_log([str(SHOP)], rewards=str(REWARDS)))
    log = tmp_path / "own.jsonl"
    line = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "id": "x"}'
    log.write_text(line)
    for labels in ("id", ("id",), ["id"]):
        with pytest.raises(rollout_io.RolloutError, match="no_token_ids"):
            rollout_io.read_log(log, group_by=labels)


def test_a_mapping_and_another_format_are_refused():
    with pytest.raises(ConfigError) as caught:
        rollout_io.read_log(SHOP, map={"response": "response"}, format="traces")
    assert (caught.value.where, caught.value.hint) == ("--map", "omit --format")


def test_an_option_of_the_command_is_declared_once():
    assert isinstance(command, click.Command)
    assert len({param.name for param in command.params}) == len(command.params)
