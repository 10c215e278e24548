"""Before the first update: models, optimizers, and every check of the dataset against them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import polars as pl
from accelerate import Accelerator

import rollout_io
from trainer.advice import warnings_before
from trainer.checks import check_rows, corrects_for_sampler, refuse_unseen_truncation
from trainer.config import TrainConfig
from trainer.critic import Critic, CriticLearner, load_critic
from trainer.forest import RowLimit
from trainer.launch import wrap, wrap_frozen
from trainer.log import say
from trainer.lora import WithoutAdapter, add_adapter
from trainer.optimizer import make_optimizer
from trainer.plan import Plan
from trainer.policy import Policy, load_policy, row_limit
from trainer.update import Learner


@dataclass(frozen=True, kw_only=True, slots=True)
class Models:
    """The models of a run, as they were loaded.

    Attributes:
        policy: What trains.
        reference: What the KL divergence is from, if one is asked for.
        critic: What gae takes values from.
        limit: The longest row that can be forwarded.
        vocab_size: All of them know the token ids 0 to vocab_size - 1.
    """

    policy: Policy
    reference: Policy | None
    critic: Critic | None
    limit: RowLimit
    vocab_size: int


def load_models(config: TrainConfig, checkpoint: Path | None) -> Models:
    """Load the models; policy and critic are those of `checkpoint`, if there is one.

    Raises:
        RolloutError: A model cannot be trained as asked.
    """
    policy = _policy(config, checkpoint)
    reference, critic = _reference(config), _critic(config, checkpoint)
    models = [found.model for found in (policy, reference, critic) if found]
    limits = [row_limit(model.config, config.tokens_per_micro_batch) for model in models]
    if config.gradient_checkpointing:
        policy.checkpoint_layers()
    return Models(
        policy=policy,
        reference=reference,
        critic=critic,
        limit=min(limits, key=lambda limit: limit.num_tokens),
        vocab_size=min(model.get_input_embeddings().weight.shape[0] for model in models),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """What the check of a dataset comes to, if nothing is refused.

    Attributes:
        corrects: Whether importance weights and masks apply.
        remarks: Text for people by the name of its subject.
    """

    corrects: bool
    remarks: dict[str, str]


def check_dataset(
    config: TrainConfig, models: Models, index: pl.DataFrame, plan: Plan, *, must_learn: bool = True
) -> Checked:
    """Check every row of `config.dataset` against the models and the configuration.

    Args:
        config: The run's configuration.
        models: The run's models.
        index: What `trainer.data.index_rows` returns.
        plan: The plan of the dataset.
        must_learn: Refuse a dataset of which nothing can be learned.

    Raises:
        RolloutError: A row cannot be trained as asked.
    """
    size, limit = models.vocab_size, models.limit
    rows = check_rows(index, plan, config, vocab_size=size, limit=limit, must_learn=must_learn)
    if rows.is_empty():
        return Checked(corrects=config.corrects_for_sampler, remarks={})
    metadata = rollout_io.read_metadata(config.dataset)
    corrects = corrects_for_sampler(rows, config, metadata.logprobs_mode)
    if corrects:
        refuse_unseen_truncation(metadata, config)
    found = {}
    if config.corrects_for_sampler and not corrects:
        found["corrects"] = (
            "note: no rollout_logprobs: importance correction (tis_ratio_type) is off"
        )
    texts = warnings_before(rows, plan, config)
    found |= {name: f"warning: {text}" for name, text in texts.items()}
    return Checked(corrects=corrects, remarks=found)


def make_learners(
    accelerator: Accelerator, config: TrainConfig, models: Models, *, corrects: bool
) -> tuple[Learner, CriticLearner | None]:
    """Give the models optimizers, and all of them to the processes and devices of the run.

    Raises:
        RolloutError: The launch, or an optimizer, asks for what is not there.
    """
    device, reference, critic = accelerator.device, None, None
    if models.critic:
        trained, rate = models.critic.trained_parameters(), config.critic_learning_rate
        optimizer = make_optimizer(trained, config, learning_rate=rate, device=device)
        model, optimizer = wrap(accelerator, models.critic, optimizer)
        critic = CriticLearner(
            accelerator=accelerator, critic=model, optimizer=optimizer, config=config
        )
    trained, rate = models.policy.parameters(), config.learning_rate
    optimizer = make_optimizer(trained, config, learning_rate=rate, device=device)
    policy, optimizer = wrap(accelerator, models.policy, optimizer)
    if models.reference:
        reference = wrap_frozen(accelerator, models.reference)
    elif config.needs_reference:
        reference = WithoutAdapter(policy)
    learner = Learner(
        accelerator=accelerator,
        policy=policy,
        optimizer=optimizer,
        config=config,
        corrects=corrects,
        reference=reference,
    )
    return learner, critic


def _policy(config: TrainConfig, checkpoint: Path | None) -> Policy:
    """That of `checkpoint`, if there is one: its model, or its adapter in the model it began as."""
    policy = load_policy(
        str(config.model if config.lora_rank else checkpoint or config.model),
        logprob_chunk_tokens=config.logprob_chunk_tokens,
        entropy_gradient=config.entropy_loss_coef > 0,
        trees=config.sequence_layout == "tree",
    )
    if config.lora_rank:
        add_adapter(policy, config, checkpoint and checkpoint / "adapter")
        trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
        say(f"note: LoRA: {trained} parameters train")
    return policy


def _reference(config: TrainConfig) -> Policy | None:
    """The frozen policy that the KL divergence is from, if one with weights of its own is needed."""
    if not config.needs_reference or (config.lora_rank and not config.reference_model):
        return None
    path = config.reference_model or config.model
    trees = config.sequence_layout == "tree"
    return load_policy(path, logprob_chunk_tokens=config.logprob_chunk_tokens, trees=trees)


def _critic(config: TrainConfig, checkpoint: Path | None) -> Critic | None:
    if config.advantage_estimator != "gae":
        return None
    path = str(checkpoint / "critic") if checkpoint else config.critic_model or config.model
    trees = config.sequence_layout == "tree"
    return load_critic(path, gradient_checkpointing=config.gradient_checkpointing, trees=trees)
