"""Settings, planned cost and result of an audit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import polars as pl
import pyarrow as pa

from schemas.forensics import MEANINGS, NO_FAULT, VERDICT_COLUMNS
from schemas.metadata import LogprobsMode
from trainer.forensics.audit.candidates import Candidate
from trainer.forensics.audit.noise import Noise, Residuals
from trainer.forensics.audit.scores import Cost

FAULTS = tuple(kind for kind in MEANINGS if kind not in NO_FAULT)
SCHEMA = pl.Schema({c.name: pl.Series(pa.array([], c.type)).dtype for c in VERDICT_COLUMNS})


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditSettings:
    """Settings of an audit."""

    thorough: bool = False  # forward all rows under all candidates
    explains: bool = True  # try other prompts and precisions for spans that no candidate explains
    tokens_per_micro_batch: int = 2048  # longer rows are forwarded alone


@dataclass(kw_only=True, slots=True)
class Plan:
    """Number of tokens to forward, known before an audit starts."""

    num_candidates: int
    num_distinct: int = 0  # which each candidate may have to forward
    num_first: int = 0  # forwarded by the first pass
    # If every row must be scored under all candidates, without attempts to explain differences.
    num_most: int = 0


@dataclass(kw_only=True)
class AuditResult:
    """Result of an audit."""

    candidates: Sequence[Candidate]
    plan: Plan
    cost: Cost
    verdicts: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=SCHEMA))
    noise: Noise = field(default_factory=Noise)
    mode: LogprobsMode = "raw"  # kind of the stored log-probabilities
    mode_is_inferred: bool = True
    num_mode_tokens: int = 0  # from which the mode is inferred; 0 if it is only assumed
    num_rows: int = 0  # audited
    num_suspicious: int = 0  # rows forwarded under all candidates, as they did not fit their label
    clean: list[Residuals] = field(default_factory=list)  # of the spans without faults
    apart: dict[tuple[int, int], float] = field(
        default_factory=dict
    )  # distances of candidates, nats

    @property
    def faults(self) -> pl.DataFrame:
        """The verdicts of spans with a fault."""
        return self.verdicts.filter(pl.col("kind").is_in(FAULTS))
