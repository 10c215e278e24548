"""Open a run: plan, check and load everything, models and optimizers too, before the first update."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import rollout_io
from rollout_io.configuration import flat
from rollout_io.dataset.storage import Location, occupied
from schemas.columns import PICTURES
from schemas.errors import InputError, count
from trainer.batch import index_rows
from trainer.batches.pictures import placeholder_of
from trainer.batches.plan import Plan, dataset_returns, make_plan, num_planned_updates
from trainer.config.sections import ModelConfig
from trainer.config.train_config import PATHS, TrainConfig, resolved, uses
from trainer.distributed.accelerator import make_accelerator, wrap, wrap_frozen
from trainer.distributed.meeting import machines, on_this_machine, once_here, together
from trainer.distributed.processes import agreed, is_first_here
from trainer.models.critic import Critic, load_critic
from trainer.models.layers import compile_layers, num_layers, recompute_layers
from trainer.models.lora import WithoutAdapter, add_adapter
from trainer.models.optimizer import make_optimizer
from trainer.models.policy import (
    Policy,
    align,
    has_shapes_only,
    load_policy,
    refuse_quantised,
    use_float32_head,
)
from trainer.run.checkpoint import check_files, checkpoint_facts, other_files
from trainer.run.dataset_checks import check_dataset, num_greedy_rows, scan_rows
from trainer.run.messages import Remark, say, say_attention, say_learning_rate, show, warn
from trainer.run.model_checks import check_tokenizers, model_digests
from trainer.run.resume import (
    IN_DIGEST,
    check_max_updates,
    dataset_digest,
    find_checkpoint,
    lines_to_keep,
    load_progress,
    restore,
    say_if_new,
    table_digest,
)
from trainer.run.run import Position, Progress, Run


def open_run(
    config: TrainConfig,
    *,
    resume: bool | None = False,
    checkpoint: Path | None = None,
    opened: Run | None = None,
    num_planned: int | None = None,
    first_batch: int = 0,
    needs_weights: bool = True,
    tell: Callable[[str, Remark], None] = lambda _, remark: show(remark),
) -> Run:
    """Plan, check and load a run, without writing anything.

    `rollouts train` opens a new run, or resumes one; `rollouts rl` opens each iteration as a run of
    the same models; `rollouts replay` and `rollouts blame` open a run as it was at a checkpoint.

    Args:
        config: Configuration of the run.
        resume: True: start from the latest checkpoint in `config.run.out`, if there is one. False:
            there must be no run. None: start from `checkpoint`; the directory is only read.
        checkpoint: Checkpoint to start from if `resume` is None; None: the configured models.
        opened: Models that are in memory already, with which the run is opened; a dataset from
            which they learn nothing is then accepted. None: load them.
        num_planned: Maximum number of updates; None: as many as the plan has.
        first_batch: See `Run`.
        needs_weights: Whether the models need their weights. Otherwise, their shapes suffice: the
            models of the run are fake tensors.
        tell: Called with each remark about the dataset, and with its subject.

    Raises:
        RolloutError: See `trainer.training.train`.
    """
    accelerator = opened.accelerator if opened else _started(config)
    # Each of these stages fails in all processes if it fails in one.
    config, start = together(lambda: _resolve(config, checkpoint, resume=resume), _settings)
    if resume is not None:
        say_learning_rate(config)
    if not opened:
        say_attention(accelerator)
    rollouts = together(lambda: scan_rows(config))
    returns, index = once_here(lambda: _tables(config, rollouts), accelerator.process_index)
    plan = together(lambda: make_plan(returns, config), lambda plan: _digests(plan, index))
    if opened:
        run = replace(opened, config=config)
    else:
        compared = together(lambda: _compare_tokenizers(config), lambda _: model_digests(config))
        digest = dataset_digest(plan, index)
        with nullcontext() if needs_weights else shapes_only(accelerator.device):
            run = open_models(config, start, accelerator, digest=digest, keeps_lines=bool(resume))
        for remark in compared:
            show(remark)
    run, must_learn = replace(run, rollouts=rollouts, plan=plan), opened is None
    corrects_for_sampler, pictures, remarks = agreed(
        accelerator, lambda: check_dataset(run, index, plan, must_learn=must_learn)
    )
    for subject, remark in remarks.items():
        tell(subject, remark)
    run = replace(
        run,
        corrects_for_sampler=corrects_for_sampler,
        pictures=pictures,
        num_planned=num_planned or num_planned_updates(plan, config.batch),
        num_greedy_rows=num_greedy_rows(index, plan),
        first_batch=first_batch,
    )
    if resume is not None:
        if run.checkpoint:
            say(f"resuming from {run.checkpoint}")
        _note_few_updates(run)
    return run


def open_models(
    config: TrainConfig,
    checkpoint: Path | None,
    accelerator: Accelerator,
    *,
    digest: str,
    keeps_lines: bool = False,
) -> Run:
    """Load the models of a run, and restore its state; see `open_run` for its dataset.

    Args:
        config: Configuration of the run; `data` is not used.
        checkpoint: Checkpoint to resume from, which other machines than the main process's need not
            have; None in the main process: the configured models.
        accelerator: Connects the processes of the run.
        digest: Identifies the dataset in checkpoints; the dataset of `rollouts rl` grows.
        keeps_lines: Whether to read the lines of `metrics.jsonl` up to the checkpoint.

    Raises:
        RolloutError: A model cannot be trained as configured, or the checkpoint is unreadable.
    """
    keeps_lines = keeps_lines and accelerator.is_main_process
    with on_this_machine(accelerator, checkpoint) as start:
        progress, lines = agreed(
            accelerator, lambda: _progress(config, start, digest, keeps=keeps_lines)
        )
        models = agreed(accelerator, lambda: load_models(config, start))
        run = make_run(accelerator, config, models)
        if accelerator.num_processes > 1:
            where = count(len(set(machines())), "machine")
            say(f"training with {accelerator.num_processes} processes on {where}")
        if start:
            restore(start / "state", run.optimizers)
    return replace(run, checkpoint=checkpoint, progress=progress, digest=digest, kept_metrics=lines)


@contextmanager
def shapes_only(device: torch.device) -> Iterator[None]:
    """Make tensors without values, on a device, in this context."""
    module: Any = torch.nn.Module
    move = module.to
    with FakeTensorMode(allow_non_fake_inputs=True), device:
        module.to = lambda self, *_, **__: self  # PyTorch cannot move modules without values
        try:
            yield
        finally:
            module.to = move


def _started(config: TrainConfig) -> Accelerator:
    accelerator = make_accelerator(config)
    set_seed(config.run.seed)
    return accelerator


def _resolve(
    config: TrainConfig, checkpoint: Path | None, *, resume: bool | None
) -> tuple[TrainConfig, Path | None]:
    """Check the dataset, and return the resolved configuration and the checkpoint to start from."""
    out = Path(config.run.out)
    if resume is False:
        refuse_existing_run(out)
    if is_first_here():  # a failure on one machine ends all processes
        rollout_io.validate(config.data.dataset)
    config = resolved(config)
    if resume:
        checkpoint = find_checkpoint(config)
        say_if_new(out)
    return config, checkpoint


def _settings(resolved: tuple[TrainConfig, Path | None]) -> dict[str, Any]:
    """What must be the same in all processes before the dataset is read."""
    config, checkpoint = resolved
    settings = flat(dataclasses.asdict(config))
    lasting = {key: settings[key] for key in settings if key not in (*PATHS, "run.out")}
    return lasting | checkpoint_facts(checkpoint)


def _digests(plan: Plan, index: pl.DataFrame) -> dict[str, Any]:
    """What a dataset must have in common on all machines: what `dataset_digest` hashes."""
    return {
        "data.dataset: number of rows": len(index),
        "data.dataset: trajectories and returns": table_digest(plan.trajectories)[:16],
        "data.dataset: tokens and what trains": table_digest(index.select(IN_DIGEST))[:16],
    }


def _tables(config: TrainConfig, rollouts: pl.LazyFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the returns of the dataset's trajectories (`dataset_returns`), and the index of its rows."""
    returns = dataset_returns(rollouts, config)
    placeholder = None
    if config.data.pictures == "show" and PICTURES in rollouts.collect_schema():
        placeholder = placeholder_of(config.model.path)
    imitates = config.loss.is_supervised
    return returns, index_rows(rollouts, imitates=imitates, placeholder=placeholder)


def _progress(
    config: TrainConfig, start: Path | None, digest: str, *, keeps: bool
) -> tuple[Progress, bytes]:
    """Return the progress at the start, and the lines of metrics up to it, if they are kept."""
    progress = Progress(position=Position(kl_coef=config.loss.kl_reward_coef))
    if start:
        check_files(start)
        progress = load_progress(start / "state", digest)
    check_max_updates(config.batch.max_updates, progress.global_step)
    metrics = Path(config.run.out) / "metrics.jsonl"
    return progress, lines_to_keep(metrics, progress.num_mini_batches) if keeps else b""


def _compare_tokenizers(config: TrainConfig) -> list[Remark]:
    """Return notes on the models' tokenizers and on the user functions of the run."""
    functions = [f"note: {key}: {one}" for key, one in uses(config).items() if one.location]
    compared = check_tokenizers(config, rollout_io.read_metadata(config.data.dataset))
    return [*map(Remark, functions), *compared]


def _note_few_updates(run: Run) -> None:
    """Log a note if the dataset yields fewer updates than `max_updates`."""
    config, plan, num_planned = run.config, run.plan, run.num_planned
    if config.batch.max_updates is None or num_planned >= config.batch.max_updates:
        return
    groups, size = count(sum(map(len, plan.batches)), "group"), config.batch.groups_per_mini_batch
    passes = f" in {count(config.batch.num_epochs, 'pass', 'es')} over the dataset"
    updates = count(num_planned, "update")
    say(
        f"note: {groups}, {size} per update, give {updates}{passes}, fewer than max_updates"
        f" ({config.batch.max_updates}): pass --set batch.num_epochs=N for more passes"
    )


def refuse_existing_run(out: Path) -> None:
    """Reject a directory that contains a run or a dataset.

    Raises:
        InputError: `existing_run`: the directory contains a run; `out_is_free`: it contains a
            dataset.
    """
    if out.is_dir() and (shards := Location.of(out).datasets()):
        raise occupied(str(out), len(shards))
    for name in ("config.json", "metrics.jsonl", "checkpoints"):
        if (out / name).exists():
            finding = f"the directory already contains a run ({name})"
            again = f"--resume {shlex.quote(str(out))}"
            hint = f"continue it with {again}, choose a different --out, or remove the run"
            raise InputError("existing_run", str(out), finding, hint=hint)


Models = tuple[Policy, Policy | None, Critic | None]
"""The policy to train, the reference of the KL divergence and the critic, as far as a run needs them."""


def load_models(config: TrainConfig, checkpoint: Path | None) -> Models:
    """Load the models; the policy and the critic come from `checkpoint`, if given.

    Raises:
        RolloutError: A model cannot be trained as configured.
    """
    for path in (
        config.model.path,
        *([config.model.critic_model] if config.model.critic_model else []),
    ):
        refuse_quantised(path)
    if left_out := other_files(Path(config.model.path))[1]:
        names = ", ".join(map(str, left_out[:8])) + (", ..." if len(left_out) > 8 else "")
        say(
            f"note: checkpoints leave out {count(len(left_out), 'entry')} of {config.model.path} (links out"
            f" of it, directories of other models, or unreadable): {names}"
        )
    policy = _policy(config, checkpoint)
    reference, critic = load_reference(config), _critic(config, checkpoint)
    if config.model.float32_head:
        for head in filter(None, (policy, reference)):
            use_float32_head(head.model)
    if auxiliary_losses(policy.model.config):
        warn(
            "config.json sets output_router_logits, but this trainer ignores auxiliary losses of routers"
            " (load balancing): watch the routing of experts over many updates"
        )
    recomputes = config.model.gradient_checkpointing
    has_values = not has_shapes_only()
    for trained in filter(None, (policy, critic)) if has_values else ():
        align(trained)
    if has_values and compiles(config.model, policy):
        compile_layers(policy.model, recomputes=recomputes)
    elif recomputes:
        recompute_layers(policy.model)
    return policy, reference, critic


def compiles(config: ModelConfig, policy: Policy) -> bool:
    """True if the layers of a policy are compiled: by default on a CUDA device, if possible."""
    if config.compile_layers is None:
        return torch.cuda.is_available() and num_layers(policy.model) > 0
    return config.compile_layers


def make_run(accelerator: Accelerator, config: TrainConfig, models: Models) -> Run:
    """Create the optimizers, and place models and optimizers on the run's processes and devices.

    Raises:
        RolloutError: The launch settings are not supported, or an optimizer's package is missing.
    """
    (policy, reference, critic), settings = models, config.optimizer
    device, critic_optimizer = accelerator.device, None
    if critic:
        trained, rate = critic.trained_parameters(), settings.critic_learning_rate
        critic_optimizer = make_optimizer(trained, settings, learning_rate=rate, device=device)
        critic, critic_optimizer = wrap(accelerator, critic, critic_optimizer)
    trained, rate = policy.parameters(), config.learning_rate
    optimizer = make_optimizer(trained, settings, learning_rate=rate, device=device)
    policy, optimizer = wrap(accelerator, policy, optimizer)
    return Run(
        config=config,
        accelerator=accelerator,
        policy=policy,
        optimizer=optimizer,
        reference=frozen_reference(accelerator, config, policy, reference),
        critic=critic,
        critic_optimizer=critic_optimizer,
        corrects_for_sampler=config.loss.corrects_for_sampler,
        source=Path(config.model.path).absolute(),
    )


def frozen_reference(
    accelerator: Accelerator, config: TrainConfig, policy: Policy, loaded: Policy | None
) -> nn.Module | None:
    """Prepare what `load_reference` returned; None stands for the policy's base weights, if needed."""
    base = WithoutAdapter(policy) if config.loss.needs_reference else None
    return wrap_frozen(accelerator, loaded) if loaded else base


def auxiliary_losses(config: Any) -> bool:
    """True if a model's configuration asks for auxiliary losses of its routers."""
    return any(
        getattr(c, "output_router_logits", False) for c in (config, config.get_text_config())
    )


def _policy(config: TrainConfig, checkpoint: Path | None) -> Policy:
    """Load the policy from the checkpoint, or from `config.model.path` if there is none."""
    policy = load_policy(
        str(config.model.path if config.model.lora_rank else checkpoint or config.model.path),
        logprob_chunk_tokens=config.model.logprob_chunk_tokens,
        entropy_gradient=config.loss.entropy_loss_coef > 0,
        trees=config.batch.sequence_layout == "tree",
    )
    if config.model.lora_rank:
        add_adapter(policy, config.model, checkpoint and checkpoint / "adapter")
        trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
        say(f"note: LoRA trains {trained:,} parameters")
    return policy


def load_reference(config: TrainConfig) -> Policy | None:
    """Load the frozen reference; None if not needed, or if the policy's base weights are used."""
    if not config.loss.needs_reference or (
        config.model.lora_rank and not config.loss.reference_model
    ):
        return None
    path = config.loss.reference_model or config.model.path
    trees = config.batch.sequence_layout == "tree"
    return load_policy(path, logprob_chunk_tokens=config.model.logprob_chunk_tokens, trees=trees)


def _critic(config: TrainConfig, checkpoint: Path | None) -> Critic | None:
    if not config.advantage.needs_critic:
        return None
    path = (
        str(checkpoint / "critic") if checkpoint else config.model.critic_model or config.model.path
    )
    trees = config.batch.sequence_layout == "tree"
    return load_critic(
        path, gradient_checkpointing=config.model.gradient_checkpointing, trees=trees
    )
