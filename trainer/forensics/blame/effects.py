"""Effects of an update: optimizer steps that are not applied, and the loss of held-out rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import polars as pl
import torch
from torch import Tensor

import rollout_io
from trainer.batch import Batch, index_rows, read_rows, to_batch
from trainer.batches.forest import Forest, chain_lengths
from trainer.batches.packing import cut_batch
from trainer.batches.plan import dataset_returns, make_plan
from trainer.config.train_config import resolved
from trainer.forensics.blame.gradients import Direction, loss_gradient, trained_parameters
from trainer.loss import critic_values, policy_logprobs
from trainer.models.optimizer import clip_and_step
from trainer.run.batch_advantages import estimate
from trainer.run.check_dataset import check_rows, check_sampling, corrects_for_sampler, scan_rows
from trainer.run.run import Run


def held_out_gradient(run: Run, dataset: str) -> dict[str, Tensor]:
    """Compute the gradient of the run's loss on another dataset, under its current policy.

    Rows are read and masked, and their advantages estimated, as in the run; all rows form one
    mini-batch. Ratios to the old policy are 1, because the old policy is the current one. For a
    loss with advantages, the result thus estimates the gradient of the negative expected return;
    for `cross_entropy`, it is the gradient of the cross-entropy of the rows. A KL penalty in the
    reward is left out, and so is the correction for sampler mismatch if the rows have no
    `rollout_logprobs`.

    Raises:
        RolloutError: The dataset cannot be used with the configuration of the run.
    """
    batch, forests, corrects = _read(run, dataset)
    learner = dataclasses.replace(run, corrects=run.corrects and corrects)
    if run.critic:
        batch = dataclasses.replace(batch, values=critic_values(run, batch, forests))
    batch = estimate(batch, run.config.advantage, is_supervised=run.config.loss.is_supervised)
    if learner.reference is not None and not run.config.loss.kl_reward_coef:
        ref_logprobs = policy_logprobs(learner, batch, forests, learner.reference)
        batch = dataclasses.replace(batch, ref_logprobs=ref_logprobs)
    return loss_gradient(learner, batch, forests)


def _read(run: Run, dataset: str) -> tuple[Batch, list[Forest], bool]:
    """Read a dataset as a single mini-batch.

    Also returns whether the loss corrects for sampler mismatch.
    """
    rollout_io.validate(dataset)
    rule = run.config.batch.merge_rule if run.config.batch.merge_rule == "consecutive" else None
    config = dataclasses.replace(
        run.config,
        data=dataclasses.replace(run.config.data, dataset=dataset),
        batch=dataclasses.replace(run.config.batch, merge_rule=rule),
    )
    config = resolved(config)
    rollouts = scan_rows(config)
    plan = make_plan(dataset_returns(rollouts, config), config)
    policy = run.whole_policy
    vocab_size = policy.model.get_input_embeddings().weight.shape[0]
    index = index_rows(rollouts, imitates=config.loss.is_supervised)
    trained = check_rows(index, plan, config, vocab_size=vocab_size, limit=run.limit)
    check_sampling(trained, config)
    corrects = corrects_for_sampler(
        trained, config, rollout_io.read_metadata(dataset).logprobs_mode
    )
    groups = [group for groups in plan.batches for group in groups]
    rows = read_rows(rollouts, plan, groups, config.batch)
    rows = rows.with_columns(mini_batch=pl.lit(0, pl.Int64))
    batch = to_batch(rows, config.batch.max_row_tokens, imitates=config.loss.is_supervised)
    run.limit.check(chain_lengths(batch.prompts, batch.responses, batch.trains), batch.names)
    (mini_batch,) = cut_batch(batch, config.batch)
    return batch, mini_batch.forests, corrects


class TrialSteps:
    """Computes the step s(g) that the learner's optimizer would take with a gradient g.

    The step includes clipping to `max_grad_norm`, the moments of earlier updates, the learning rate
    and weight decay. Weights and moments are restored after each call.

    Args:
        learner: Policy and optimizer, just before the update.
    """

    def __init__(self, learner: Run) -> None:
        self._learner = learner
        self._optimizer: Any = getattr(learner.optimizer, "optimizer", learner.optimizer)
        self._trained = trained_parameters(learner)
        self._weights = {name: p.detach().clone() for name, p in self._trained}
        state = self._optimizer.state
        self._state = {name: _copied(state[p]) for name, p in self._trained if p in state}

    @torch.no_grad()
    def __call__(self, gradient: Direction) -> dict[str, Tensor]:
        """Return the change of each parameter; 0 if the gradient is not finite."""
        for name, parameter in self._trained:
            parameter.grad = gradient[name].clone()
        parameters = [parameter for _, parameter in self._trained]
        clip_and_step(parameters, self._optimizer, self._learner.config.optimizer.max_grad_norm)
        change = {}
        for name, parameter in self._trained:
            change[name] = parameter.detach() - self._weights[name]
            parameter.copy_(self._weights[name])
            if name in self._state:
                self._optimizer.state[parameter] = _copied(self._state[name])
            else:
                self._optimizer.state.pop(parameter, None)
        return change


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()
    }
