"""Load models and optimizers, and check the dataset against them."""

from __future__ import annotations

from logging import WARNING
from pathlib import Path
from typing import Any

import polars as pl
from accelerate import Accelerator

import rollout_io
from rollout_io.formats.parsing.sampling import sampling_extra_of
from schemas.errors import count
from trainer.batches.plan import Plan
from trainer.config.train_config import TrainConfig
from trainer.distributed.launch import wrap, wrap_frozen
from trainer.models.critic import Critic, load_critic
from trainer.models.lora import WithoutAdapter, add_adapter
from trainer.models.optimizer import make_optimizer
from trainer.models.policy import (
    Policy,
    align,
    compile_layers,
    load_policy,
    refuse_quantised,
    use_float32_head,
)
from trainer.run.advice import warnings_before
from trainer.run.checkpoint import other_files
from trainer.run.dataset_checks import (
    check_rows,
    check_teacher,
    corrects_for_sampler,
    larger_limits,
    num_greedy_rows,
    truncated,
    without_tokens,
)
from trainer.run.messages import Remark, say, warn
from trainer.run.routing_checks import check_replay
from trainer.run.run import Run
from trainer.run.sampling_checks import check_sampling

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
    for trained in filter(None, (policy, critic)):
        align(trained)
    if config.model.compile_layers:
        compile_layers(policy.model)
    if config.model.gradient_checkpointing:
        policy.checkpoint_layers()
    return policy, reference, critic


def check_dataset(
    run: Run, index: pl.DataFrame, plan: Plan, *, must_learn: bool
) -> tuple[bool, dict[str, Remark]]:
    """Check every row of a run's dataset, indexed by `trainer.batches.data.index_rows`.

    With `must_learn`, a dataset from which nothing can be learned is rejected.

    Returns:
        Whether importance weights and masks apply, and notes and warnings by subject.

    Raises:
        RolloutError: A row cannot be trained on as configured.
    """
    config, size, limit = run.config, run.vocab_size, run.limit
    rows = check_rows(index, plan, config, vocab_size=size, limit=limit, must_learn=must_learn)
    num_greedy = num_greedy_rows(index, plan)
    found = {}
    if num_greedy:
        text = (
            f"{count(num_greedy, 'row')} sampled at temperature 0 will be excluded from training: greedy"
            " samples have no gradient"
        )
        found["greedy"] = Remark(text, WARNING)
    if rows.is_empty():
        return config.loss.corrects_for_sampler, found
    metadata = rollout_io.read_metadata(config.data.dataset)
    if "sampling_extra" not in rollout_io.scan(config.data.dataset).collect_schema():
        said = pl.lit(sampling_extra_of(metadata.made_by), pl.String)
        rows = rows.with_columns(pl.col("sampling_extra").fill_null(said))
    if unknown := check_sampling(rows, config):
        found["sampling"] = Remark(f"note: {unknown}")
    check_teacher(rows, config)
    corrects = corrects_for_sampler(rows, config, metadata.logprobs_mode)
    if config.loss.corrects_for_sampler and not corrects:
        found["corrects"] = Remark(
            "note: importance correction (tis_ratio_type) is off, because the dataset has no"
            " rollout_logprobs"
        )
    replaying = {config.model.path: run.whole_policy.model}  # the critic uses no recorded experts
    if isinstance(run.reference, Policy):
        replaying[config.loss.reference_model or config.model.path] = run.reference.model
    rollouts = rollout_io.scan(config.data.dataset)
    if routing := check_replay(rollouts, replaying, rows, replays=config.batch.replay_routing):
        found["routing"] = Remark(routing, WARNING)
    if cut := truncated(rows, config.batch):
        found["truncated_rows"] = Remark(f"note: {cut}")
    if config.batch.max_row_tokens and (lost := without_tokens(rows, config.batch)):
        larger = larger_limits(rows, config.batch.max_row_tokens, limit.num_tokens)
        text = f"{lost}\nHint: {larger}"
        found["cut_rows"] = Remark(text, WARNING)
    texts = warnings_before(rows, plan, config)
    found |= {name: Remark(text, WARNING) for name, text in texts.items()}
    return corrects, found


def prepare(accelerator: Accelerator, config: TrainConfig, models: Models) -> Run:
    """Create the optimizers, and place models and optimizers on the run's processes and devices.

    Raises:
        RolloutError: The launch settings are not supported, or an optimizer's package is missing.
    """
    (policy, reference, critic), settings = models, config.optimizer
    device, critic_optimizer, frozen = accelerator.device, None, None
    if critic:
        trained, rate = critic.trained_parameters(), settings.critic_learning_rate
        critic_optimizer = make_optimizer(trained, settings, learning_rate=rate, device=device)
        critic, critic_optimizer = wrap(accelerator, critic, critic_optimizer)
    trained, rate = policy.parameters(), config.learning_rate
    optimizer = make_optimizer(trained, settings, learning_rate=rate, device=device)
    policy, optimizer = wrap(accelerator, policy, optimizer)
    if reference:
        frozen = wrap_frozen(accelerator, reference)
    elif config.loss.needs_reference:
        frozen = WithoutAdapter(policy)
    return Run(
        config=config,
        accelerator=accelerator,
        policy=policy,
        optimizer=optimizer,
        reference=frozen,
        critic=critic,
        critic_optimizer=critic_optimizer,
        corrects=config.loss.corrects_for_sampler,
        source=Path(config.model.path).absolute(),
    )


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
