"""SkyRL's entry point with a generator that keeps its rollouts in $ROLLOUTS.

Run it in place of `skyrl.train.entrypoints.main_base`, with the same arguments.
"""

import os
import sys
from pathlib import Path
from typing import Any

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.utils import initialize_ray, validate_cfg

from rollout_io.hooks.skyrl import RecordedGenerator
from schemas.metadata import DatasetMetadata


class RecordedExp(BasePPOExp):
    """An experiment whose generator keeps its rollouts."""

    def get_generator(
        self, cfg: SkyRLTrainConfig, tokenizer: Any, inference_engine_client: Any
    ) -> RecordedGenerator:
        """Return SkyRL's generator, recorded."""
        generator = super().get_generator(cfg, tokenizer, inference_engine_client)
        return RecordedGenerator(
            generator, os.environ["ROLLOUTS"], DatasetMetadata(logprobs_mode="processed")
        )


@ray.remote(num_cpus=1)
def train(cfg: SkyRLTrainConfig, dataset: str) -> None:
    os.environ["ROLLOUTS"] = dataset
    RecordedExp(cfg).run()


if __name__ == "__main__":
    config = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    validate_cfg(config)
    initialize_ray(config)
    ray.get(train.remote(config, str(Path(os.environ["ROLLOUTS"]).resolve())))
