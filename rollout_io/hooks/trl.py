"""Keep the rollouts of TRL's GRPO and RLOO trainers (1.16): `examples/hooks/trl_grpo.py`."""

from __future__ import annotations

import hashlib
import math
import os
from typing import Any

from rollout_io.formats.parsing.bodies import sampling_extra
from rollout_io.hooks.appender import RolloutAppender
from schemas.metadata import DatasetMetadata


def record(
    trainer: Any, dataset: str | os.PathLike[str], metadata: DatasetMetadata | None = None
) -> RolloutAppender | None:
    """Append every training batch to a dataset; the main process writes, and gets the appender."""
    from accelerate.utils import gather_object

    appender = RolloutAppender(dataset, metadata) if trainer.accelerator.is_main_process else None
    generate, score, sampled = trainer._generate, trainer._calculate_rewards, list[Any]()

    def generate_and_hold(prompts: Any) -> Any:
        sampled[:] = batch = generate(prompts)
        return batch

    def score_and_append(*given: Any) -> Any:
        scores = score(*given)
        if trainer.model.training:
            prompts, responses, masks, _, logprobs, _, images, _ = sampled
            columns = [column or [None] * len(prompts) for column in (masks, logprobs, images)]
            rows = gather_object(list(zip(prompts, responses, *columns, strict=True)))
            if appender is not None:
                appender.append(_output(trainer, rows, scores))
        return scores

    trainer._generate, trainer._calculate_rewards = generate_and_hold, score_and_append
    return appender


def _output(trainer: Any, rows: list[Any], scores: Any) -> dict[str, Any]:
    prompts, responses, masks, logprobs, images = map(list, zip(*rows, strict=True))
    size, args, names = trainer.num_generations, trainer.args, trainer.reward_func_names
    digests = [hashlib.blake2b(repr(ids).encode(), digest_size=6).hexdigest() for ids in prompts]
    how = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k or None}
    params = {name: getattr(args, name) for name in ("min_p", "repetition_penalty")}
    how |= {"sampling_extra": sampling_extra(params), "policy_version": trainer.state.global_step}
    return {
        "trajectory_ids": [f"prompt-{digest}_{i % size}" for i, digest in enumerate(digests)],
        "prompt_token_ids": prompts,
        "response_ids": responses,
        "loss_masks": [m or [1] * len(r) for m, r in zip(masks, responses, strict=True)],
        "rollout_logprobs": None if None in logprobs else logprobs,
        "rewards": (scores * trainer.reward_weights.to(scores.device)).nansum(dim=1).tolist(),
        "env_metrics": [
            {k: v for k, v in zip(names, row, strict=True) if not math.isnan(v)}
            for row in scores.tolist()
        ],
        "error": ["not scored" if row.isnan().all() else None for row in scores],
        "pixel_values": images if any(images) else None,
        **{name: [value] * len(rows) for name, value in how.items()},
    }
