"""Settings, planned cost and result of an audit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import polars as pl
import pyarrow as pa

from schemas.forensics import VERDICT_COLUMNS
from schemas.metadata import LogprobsMode
from trainer.forensics.audit.candidates import Candidate
from trainer.forensics.audit.noise import Noise, Residuals
from trainer.forensics.audit.rescoring import Cost
from trainer.forensics.audit.verdicts import FAULTS


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditSettings:
    """Settings of an audit.

    Attributes:
        thorough: Forward all rows under all candidates.
        first_pass: Fraction of the sampled tokens that the first pass scores, under their labelled
            weights; None: all.
        explains: Try other prompts and precisions for spans that no candidate explains.
        trees: Forward shared prefixes once; if false, rows are forwarded separately.
        tokens_per_micro_batch: Maximum number of tokens per forward pass, except for longer rows.
    """

    thorough: bool = False
    first_pass: float | None = None
    explains: bool = True
    trees: bool = True
    tokens_per_micro_batch: int = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Cost of an audit, known before it starts.

    Attributes:
        num_candidates: Number of candidates.
        num_distinct: Distinct tokens of the rows, which each candidate may have to forward.
        num_first: Tokens that the first pass forwards.
        num_most: Tokens to forward if every row must be scored under all candidates, not counting
            attempts to explain differences that no candidate explains.
    """

    num_candidates: int
    num_distinct: int
    num_first: int
    num_most: int


@dataclass(kw_only=True)
class AuditResult:
    """Result of an audit.

    Attributes:
        verdicts: One row per span; see `schemas.VERDICT_COLUMNS`.
        candidates: The candidates.
        noise: Noise of the dataset's engine.
        mode: Kind of the stored log-probabilities.
        mode_is_inferred: True if the dataset's metadata does not contain the mode.
        num_mode_tokens: Number of tokens from which the mode is inferred; 0 if it is only assumed.
        plan: Planned cost.
        cost: Actual cost.
        num_rows: Rows audited.
        num_suspicious: Rows forwarded under all candidates because they did not fit their label.
        num_first_scored: Tokens that the first pass scored, not counting rows of the sample.
        num_sampled: Sampled tokens of the audited rows.
        clean: Residuals of the spans without faults.
        apart: Mean absolute difference in nats between two candidates, by their indices.
    """

    verdicts: pl.DataFrame
    candidates: Sequence[Candidate]
    noise: Noise
    mode: LogprobsMode
    mode_is_inferred: bool
    plan: Plan
    cost: Cost
    num_rows: int
    num_suspicious: int
    num_mode_tokens: int = 0
    num_first_scored: int = 0
    num_sampled: int = 0
    clean: list[Residuals] = field(default_factory=list)
    apart: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def faults(self) -> pl.DataFrame:
        """The verdicts of spans with a fault."""
        return self.verdicts.filter(pl.col("kind").is_in(FAULTS))


SCHEMA = pl.Schema(
    {column.name: pl.Series(pa.array([], column.type)).dtype for column in VERDICT_COLUMNS}
)
"""Types of the verdicts' columns, `schemas.VERDICT_COLUMNS`."""
