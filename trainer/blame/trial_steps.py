"""Optimizer steps that are computed but not applied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.blame.gradients import Direction, trained_parameters
from trainer.distributed.sharding import clip_and_step
from trainer.run.update import Learner


class TrialSteps:
    """Computes the step s(g) that the learner's optimizer would take with a gradient g.

    The step includes clipping to `max_grad_norm`, the moments of earlier updates, the learning rate
    and weight decay. Weights and moments are restored after each call.

    Args:
        learner: Policy and optimizer, just before the update.
    """

    def __init__(self, learner: Learner) -> None:
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
        clip_and_step(parameters, self._optimizer, self._learner.max_grad_norm)
        found = {}
        for name, parameter in self._trained:
            found[name] = parameter.detach() - self._weights[name]
            parameter.copy_(self._weights[name])
            if name in self._state:
                self._optimizer.state[parameter] = _copied(self._state[name])
            else:
                self._optimizer.state.pop(parameter, None)
        return found


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()
    }
