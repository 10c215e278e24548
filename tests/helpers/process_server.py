"""Forks itself into several processes for every job it reads: `python -m tests.helpers.process_server`."""

import dataclasses
import json
import os
import socket
import sys
import traceback
from pathlib import Path

import peft
import torch
import transformers.models.llama.modeling_llama  # noqa: F401
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import trainer.cli.train
import trainer.distributed.accelerator
import trainer.engine.embedded
import trainer.rl.loop
import trainer.run.model_checks
import trainer.run.open_run
from rollout_io.cli.main import run as run_command
from rollout_io.cli.output import shown_log
from rollout_io.retokenize.tokenizer import load_tokenizer
from tests.helpers.configs import from_saved, train_config
from tests.helpers.trainer_helpers import forests_of, make_batch, run_of, tiny_policy, update_with
from trainer import rl
from trainer.distributed.accelerator import make_accelerator, whole
from trainer.models.lora import add_adapter, checkpoint_weights
from trainer.models.pictures import without_encoder
from trainer.training import train


def shard(_, model, optimizer):
    """What Accelerate's FSDP2 does on GPUs: each layer, then what is left."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    for layer in model.model.base_model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sharded = dict(model.named_parameters())
    for group, wanted in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [sharded[name] for name in wanted]
    check_sharded(model)
    return model, optimizer


def fsdp2(**settings):
    """An accelerator as on GPUs: Accelerate itself would have FSDP there alone."""
    accelerator = Accelerator(**settings)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
    )
    accelerator.state.fsdp_plugin = plugin
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    return accelerator


def prepared(*models):
    """What `trainer.distributed.accelerator.wrap` makes of them, sharded layer by layer."""
    model, optimizer = trainer.distributed.accelerator.wrap(*models)
    check_sharded(model)
    assert all(isinstance(layer, FSDPModule) for layer in model.model.get_decoder().layers)
    return model, optimizer


def check_sharded(model):
    with without_encoder(model.model) as encoder:
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            assert parameter.to_local().numel() < parameter.numel() or len(parameter) == 1
    for part in encoder:
        assert not any(isinstance(parameter, DTensor) for parameter in part.parameters())


def gradient(job):
    """Save the gradient of one update of a tiny policy, and its norm."""
    rows = job["rows"]
    accelerator = make_accelerator(train_config(out="o"))
    advantages = [float(i + 1) for i in range(len(rows))]
    of_all = make_batch(rows, advantages=advantages)
    rank, size = accelerator.process_index, accelerator.num_processes
    own = [row if i % size == rank else ([], [], []) for i, row in enumerate(rows)]
    batch = dataclasses.replace(
        make_batch(own, advantages=advantages),
        num_targets=of_all.num_targets,
        num_response=of_all.num_response,
    )
    policy = tiny_policy(tie_word_embeddings=job["tied"])
    learner = run_of(policy, max_grad_norm=1e9, learning_rate=1e-30)
    assert learner.accelerator.num_processes == accelerator.num_processes > 1
    policy, optimizer = shard(None, policy, learner.optimizer)
    kept = {}

    def keep(*_):
        kept.update((n, whole(p.grad)) for n, p in policy.named_parameters() if p.grad is not None)

    optimizer.register_step_pre_hook(keep)
    metrics = update_with(learner, batch, forests_of(batch, job["budget"]), None)
    if accelerator.is_main_process:
        save_file(kept | {"norm": torch.tensor(metrics["grad_norm"])}, job["file"])


def weights(job):
    """Save what each process gives to an engine, before and after its parameters are sharded."""
    accelerator = make_accelerator(train_config(out="o"))
    policy, folder = tiny_policy(), Path(job["weights"])
    add_adapter(policy, train_config(lora_rank=4).model)
    torch.manual_seed(0)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    for name in ("whole", str(accelerator.process_index)):
        weights = {n: t.clone().contiguous() for n, t in checkpoint_weights(policy.model)}
        if name != "whole" or accelerator.is_main_process:
            save_file(weights, folder / f"{name}.safetensors")
        if name == "whole":
            shard(None, policy, torch.optim.SGD(policy.parameters()))


class AdapterEngine(trainer.engine.embedded.TransformersEngine):
    """Loads adapters as vLLM does: onto the model that it has at the start."""

    @classmethod
    def open(cls, config):
        engine = cls.load(config.model, max_batch_size=config.max_concurrency)
        engine.base = config.model
        return engine

    async def takes_adapters(self):
        return True

    def _load(self, path):
        base = AutoModelForCausalLM.from_pretrained(self.base)
        merged = peft.PeftModel.from_pretrained(base, path).merge_and_unload()
        self.model.load_state_dict(merged.state_dict())


def work(job):
    if job.get("sharded") == "directly":
        trainer.run.open_run.wrap = shard
    if job.get("sharded") == "by Accelerate":
        trainer.distributed.accelerator.Accelerator, trainer.run.open_run.wrap = fsdp2, prepared
    if "command" in job:
        sys.exit(run_command(job["command"]))
    if "file" in job:
        return gradient(job)
    if "weights" in job:
        return weights(job)
    if "rl" in job:
        engine = AdapterEngine.open if job.get("takes_adapters") else None
        config, resume = from_saved(rl.RlConfig, job["rl"]), job.get("resume", False)
        with shown_log():
            rl.run(config, resume=resume, open_engine=engine)
        return None
    config = train_config(**job["config"] | job.get(f"rank {os.environ['RANK']}", {}))
    with shown_log():
        train(config, resume=job.get("resume", False))
    return None


def start(job, rank, port):
    """Do a job in a process of its own; its id."""
    child = os.fork()
    if child:
        return child
    size = job.get("num_processes", 2)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1"} | job.get("environment", {}))
    error = os.open(Path(job["stderr"]) / f"{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(error, 2)
    os.dup2(error, 1)
    code = 0
    try:
        work(job)
    except SystemExit as stop:
        code = int(str(stop.code))
    except BaseException:
        traceback.print_exc()
        code = 3
    sys.stderr.flush()
    os._exit(code)


def load_tokenizer_once(model):
    """Loading SmolLM2's tokenizer takes longer than most runs."""
    loaded = load_tokenizer(model)
    for module in (trainer.rl.loop, trainer.engine.embedded, trainer.run.model_checks):
        module.load_tokenizer = lambda *_, **__: loaded  # type: ignore[attr-defined]


def main():
    for line in sys.stdin:
        job = json.loads(line)
        if "rl" in job:
            load_tokenizer_once(job["rl"]["model"]["path"])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = [start(job, rank, port) for rank in range(job.get("num_processes", 2))]
        sys.stdout.write(f"{children}\n")
        sys.stdout.flush()
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        sys.stdout.write(f"{codes}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
