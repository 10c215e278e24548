"""Transfer of weights between vLLM's own classes; only NCCL is replaced, by Gloo."""

import asyncio
import json
import logging
import re
import sys
import threading

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipelines.generation import Sampling
from pipelines.generation.engines.vllm import VllmEngine
from tests.conftest import ROOT
from tests.helpers import gloo_for_nccl
from tests.vllm.test_engine import QUESTIONS, differences, prompt_ids
from tests.vllm.test_rl import (
    check_the_engine_spoke_for_the_policy,
    config_of,
    overrides_of,
    rows_of,
)
from trainer import rl
from trainer.engine.nccl_sender import open_nccl_sender
from trainer.models.policy import load_policy

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]
__all__ = ["config_of", "overrides_of"]


@pytest.fixture(scope="module", autouse=True)
def vllm():
    """vLLM's `nccl` backend in this process, over Gloo."""
    (packages,) = (ROOT / ".venv-vllm" / "lib").glob("python*/site-packages")
    sys.path.append(str(packages))
    from vllm.distributed.weight_transfer import nccl_engine

    gloo_for_nccl.install()
    yield nccl_engine
    sys.path.remove(str(packages))


@pytest.fixture(scope="module")
def server(start_vllm, small_smollm2, tmp_path_factory):
    """A real server with weight transfer."""
    arguments = ["--weight-transfer-config", '{"backend": "nccl"}']
    plugin = gloo_for_nccl.as_plugin(tmp_path_factory.mktemp("plugin"))
    with start_vllm(*arguments, model=small_smollm2, PYTHONPATH=plugin) as server:
        yield server


@pytest.fixture(scope="module")
def versions(small_smollm2, tmp_path_factory):
    """Save three models that differ in every weight."""
    folder = tmp_path_factory.mktemp("weights")
    model = AutoModelForCausalLM.from_pretrained(small_smollm2, dtype=torch.float32)
    paths = {}
    for version in (1, 2, 3):
        torch.manual_seed(version)
        with torch.no_grad():
            for weight in model.parameters():
                weight *= 1 + 0.05 * torch.randn_like(weight)
        paths[version] = folder / f"version_{version}"
        model.save_pretrained(paths[version])
    return paths


def with_engine(server, use):
    async def run():
        async with VllmEngine(server.url, senders={"nccl": open_nccl_sender}) as engine:
            return await use(engine)

    return asyncio.run(run())


async def sampled_of(engine, tokenizer):
    prompts = prompt_ids(tokenizer, QUESTIONS[:6])
    return await asyncio.gather(*(engine.sample(p, Sampling(max_tokens=30)) for p in prompts))


async def version_of(engine):
    (answer,) = await engine.servers.call_each("/weight_info")
    return json.loads(answer)["weight_version"]


def check_says_what_the_model_says(sampled, path):
    policy = load_policy(str(path), logprob_chunk_tokens=256)
    assert np.abs(differences(policy, sampled)).max() < 1e-3


def test_the_server_samples_from_all_layers_of_each_transferred_version(
    server, versions, tokenizer, caplog
):
    async def use(engine):
        found = {}
        for version in (1, 2):
            await engine.load_weights(str(versions[version]), policy_version=version)
            assert await version_of(engine) == str(version)
            found[version] = await sampled_of(engine, tokenizer)
        return found

    caplog.set_level(logging.INFO, "pipelines")
    for version, sampled in with_engine(server, use).items():
        assert {s.policy_version for s in sampled} == {version}
        check_says_what_the_model_says(sampled, versions[version])
    assert "by transfer (nccl) to 1 server" in caplog.text
    assert "transfer failed" not in caplog.text


@pytest.mark.nightly
def test_calls_that_run_during_a_transfer_continue_with_the_new_weights(
    server, versions, tokenizer
):
    async def use(engine):
        long = Sampling(max_tokens=300, extra={"ignore_eos": True})
        (prompt,) = prompt_ids(tokenizer, QUESTIONS[:1])
        calls = [asyncio.ensure_future(engine.sample(prompt, long)) for _ in range(4)]
        await asyncio.sleep(1)
        await engine.load_weights(str(versions[3]), policy_version=3)
        before = [call.done() for call in calls]
        return before, await asyncio.gather(*calls), await sampled_of(engine, tokenizer)

    before, during, after = with_engine(server, use)
    assert not any(before)
    assert [(len(s.response_ids), s.policy_version) for s in during] == [(300, 0)] * 4
    check_says_what_the_model_says(after, versions[3])


@pytest.mark.nightly
def test_a_loop_over_transfers_samples_from_each_update(
    config_of, server, small_smollm2, tmp_path, caplog
):
    caplog.set_level(logging.INFO)
    result = rl.run(config_of(server.url))
    assert (result.num_iterations, result.num_updates) == (2, 2)
    assert rows_of(tmp_path / "run")["policy_version"].to_list() == [0] * 8 + [1] * 8
    check_the_engine_spoke_for_the_policy(tmp_path / "run", small_smollm2)
    assert "by transfer (nccl) to 1 server" in caplog.text
    assert "transfer failed" not in caplog.text

    async def use(engine):
        return await version_of(engine)

    assert with_engine(server, use) == "2"


def test_a_server_loads_the_files_after_a_transfer_that_breaks_within_a_layer(
    vllm, server, versions, tokenizer, monkeypatch, caplog
):
    whole = vllm.packed_nccl_broadcast_producer

    def breaks(iterator, group, **how):
        def part():
            for name, tensor in iterator:
                if "layers.1.self_attn.v_proj" in name:
                    raise ConnectionError("the line is cut")
                yield name, tensor

        whole(part(), group, **how)

    async def use(engine):
        monkeypatch.setattr(vllm, "packed_nccl_broadcast_producer", breaks)
        begin = len(server.log.read_text())
        await engine.load_weights(str(versions[1]), policy_version=1)
        monkeypatch.setattr(vllm, "packed_nccl_broadcast_producer", whole)
        assert "ConnectionError: the line is cut" in caplog.text
        said = server.log.read_text()[begin:]
        assert re.findall(r"POST /collective_rpc HTTP/1.1. (\d+)", said) == ["200"]
        first = await version_of(engine), await sampled_of(engine, tokenizer)
        caplog.clear()
        await engine.load_weights(str(versions[2]), policy_version=2)
        assert "transfer failed" not in caplog.text
        return {1: first, 2: (await version_of(engine), await sampled_of(engine, tokenizer))}

    for version, (told, sampled) in with_engine(server, use).items():
        assert told == str(version)
        check_says_what_the_model_says(sampled, versions[version])


@pytest.mark.nightly
def test_a_server_killed_during_a_transfer_loads_the_files_when_it_is_back(
    vllm, server, versions, tokenizer, monkeypatch
):
    whole, restart = vllm.packed_nccl_broadcast_producer, threading.Thread(target=server.start)

    def kills(iterator, group, **how):
        def part():
            for number, pair in enumerate(iterator):
                if number == 10 and restart.ident is None:
                    server.stop(kill=True)
                    restart.start()
                yield pair

        whole(part(), group, **how)

    async def use(engine):
        monkeypatch.setattr(vllm, "packed_nccl_broadcast_producer", kills)
        await engine.load_weights(str(versions[3]), policy_version=3)
        restart.join()
        return await sampled_of(engine, tokenizer), await version_of(engine)

    sampled, told = with_engine(server, use)
    assert told == "3"
    check_says_what_the_model_says(sampled, versions[3])
