"""Check that a few rows of each iteration were sampled by their labelled weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl
import torch

import rollout_io
from rollout_io.dataset.filesystems import whole
from schemas.errors import InputError, RolloutError, count
from schemas.forensics import AUDIT
from trainer.distributed.sharding import is_sharded
from trainer.forensics.audit.audit import AuditResult, run_audit
from trainer.forensics.audit.causes import likely_causes
from trainer.forensics.audit.noise import Residuals
from trainer.forensics.audit.rows import read_steps, to_audit_rows
from trainer.forensics.audit.weights import Candidate, Weights
from trainer.models.lora import CONFIG
from trainer.models.policy import Policy
from trainer.rl.config import RlConfig
from trainer.run.messages import warn

MOST_CLEAN_TOKENS = 20_000
"""Maximum number of tokens of earlier iterations used to estimate the engine's noise."""
ROWS_TO_STOP = 2
"""Number of faulty rows that stop a run; if fewer rows are audited, all must be faulty."""


@dataclass(kw_only=True)
class IterationAudit:
    """Audits rows of each iteration before the policy is trained on them.

    Attributes:
        config: Configuration of the run.
        source: Absolute path of the model from which the run started.
        clean: Log-probability differences in faultless rows of earlier iterations.
    """

    config: RlConfig
    source: Path
    clean: list[Residuals] = field(default_factory=list)

    def check(self, dataset: Path, iteration: int, policy: Policy) -> dict[str, int]:
        """Audit rows of an iteration, and warn or stop if they were not sampled as labelled.

        Rows are forwarded only under their labelled weights, unless these do not fit. The policy
        in memory is version `iteration`; earlier versions are loaded if they are kept. The verdicts are
        written to the run's folder `audit`, where `rollouts view` finds them.

        Returns:
            Metrics: `num_audited_rows` and `num_mismatched_rows`; empty if the rows cannot be audited.

        Raises:
            InputError: `weights_mismatch`: rows do not fit, and `on_mismatch` is `stop`.
        """
        try:
            result = self._audited(dataset, iteration, policy)
        except (RolloutError, torch.OutOfMemoryError) as error:
            if not isinstance(error, RolloutError) and not is_sharded(policy):
                raise
            warn(f"rows of iteration {iteration + 1} cannot be audited: {error}")
            return {}
        file = Path(self.config.run.out) / AUDIT / f"{dataset.name}.parquet"
        file.parent.mkdir(exist_ok=True)
        with whole(file) as partial:
            result.verdicts.write_parquet(partial)
        if sum(len(one.difference) for one in self.clean) < MOST_CLEAN_TOKENS:
            self.clean += result.clean
        checked = result.verdicts.filter(pl.col("kind") != "not_checked")
        num_rows, num_faulty = (
            spans.select("trajectory_id", "step_index").n_unique()
            for spans in (checked, result.faults)
        )
        if num_faulty:
            self._report(dataset, result, num_rows, num_faulty)
        return {"num_audited_rows": num_rows, "num_mismatched_rows": num_faulty}

    def _audited(self, dataset: Path, iteration: int, policy: Policy) -> AuditResult:
        rollouts, metadata = rollout_io.scan(dataset), rollout_io.read_metadata(dataset)
        rng = np.random.default_rng([self.config.run.seed, iteration])
        ids = rollouts.select(pl.col("trajectory_id").unique().sort()).collect().to_series()
        chosen = ids.gather(rng.permutation(len(ids))[: self.config.loop.audit_rows])
        rows = rollouts.filter(pl.col("trajectory_id").is_in(chosen.to_list()))
        steps = read_steps(rows, metadata).filter(pl.col("response_ids").list.len() > 0)
        draw = pl.Series(rng.random(len(steps)))
        steps = steps.sort(draw).unique("trajectory_id", keep="first").sort("trajectory_id")
        candidates = self._candidates(iteration)
        weights = Weights(
            candidates,
            device=next(policy.parameters()).device,
            # Each process has only a shard of the policy, so the main process loads all of it.
            loaded={} if is_sharded(policy) else {len(candidates) - 1: policy},
            trees=False,
            budget=self.config.training.batch.tokens_per_micro_batch,
        )
        audited, named = [to_audit_rows(steps, metadata.logprobs_mode)], str(dataset)
        return run_audit(audited, weights, dataset=named, clean=self.clean, explains=False)

    def _candidates(self, iteration: int) -> list[Candidate]:
        """List the versions that are kept, ending with the current one."""
        folder = Path(self.config.run.out) / "weights"
        names = {path.name.removeprefix("version_") for path in folder.glob("version_*")}
        versions = {int(name) for name in names if name.isdecimal()} | {iteration}
        paths = {0: self.source} | {n: folder / f"version_{n}" for n in versions if n}
        return [
            Candidate(
                version=version,
                path=path,
                base=self.source if (path / CONFIG).is_file() else None,
            )
            for version, path in sorted(paths.items())
            if version <= iteration
        ]

    def _report(self, dataset: Path, result: AuditResult, num_rows: int, num_faulty: int) -> None:
        worst = result.faults.sort("log_likelihood_ratio", descending=True).row(0, named=True)
        were = "were" if num_faulty > 1 else "was"
        causes = " ".join(likely_causes(result.verdicts, result.candidates)[:2])
        text = (
            f"{num_faulty} of {count(num_rows, 'audited row')} {were} not sampled as labelled;"
            f" trajectory '{worst['trajectory_id']}', row {worst['step_index']}: {worst['reason']}"
            f" ({worst['log_likelihood_ratio']:.0f} nats)\nlikely cause: {causes}"
        )
        if self.config.loop.on_mismatch == "stop" and num_faulty >= min(ROWS_TO_STOP, num_rows):
            command = f"rollouts audit {dataset} --weights {self.config.run.out}"
            hint = f"run `{command}` to check every row, or pass --set loop.on_mismatch=warn to train anyway"
            raise InputError("weights_mismatch", str(dataset), text, hint=hint)
        warn(text)
