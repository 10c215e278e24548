"""The choices of `rollouts filter`: its options, and the filters and masks that they name."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import click

from rollout_io.cli.usage import HintedUsageError

if TYPE_CHECKING:
    import polars as pl

    from pipelines.filtering.verdicts import Filter
    from schemas.metadata import Layout, Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """The options that determine the rows of the new dataset, in the order that `--help` lists."""

    reward: str | None
    keep_rows: str | None
    move_outcome: bool
    where: tuple[str, ...]
    drop_failed_groups: bool
    drop_failed: bool
    drop_unknown: bool
    max_staleness: int | None
    policy_version: int | None
    min_tokens: int | None
    max_tokens: int | None
    min_steps: int | None
    max_steps: int | None
    min_reward: float | None
    max_reward: float | None
    min_pass_rate: float | None
    max_pass_rate: float | None
    dedup: Literal["group", "dataset"] | None
    dedup_similarity: float | None
    overlap: str | None
    drop_overlong: bool
    drop_zero_variance: bool
    best: int | None
    sample_groups: int | None
    seed: int
    mask_overlong: bool
    mask_failed_groups: bool
    mask_failed: bool
    mix: tuple[str, ...]
    share: tuple[float, ...]
    layout: Layout | None
    prefix_names: bool
    outcome: Outcome | None

    def given(self) -> dict[str, Any]:
        """Return the options that were passed, and the seed."""
        values = asdict(self).items()
        return {name: v for name, v in values if v is not None and v is not False and v != ()}


def check_usage(out: str | None, choices: Choices, *, dry_run: bool) -> None:
    """Refuse options that contradict each other, or none at all."""
    if out is None and not dry_run:
        raise click.UsageError("Missing option '--out' (or --dry-run).")
    if (choices.max_staleness is None) != (choices.policy_version is None):
        raise click.UsageError("--max-staleness and --policy-version must be passed together.")
    if choices.dedup_similarity is not None and choices.dedup is None:
        raise click.UsageError("--dedup-similarity requires --dedup.")
    if choices.move_outcome and choices.keep_rows is None:
        raise click.UsageError("--move-outcome requires --keep-rows.")
    if choices.share and len(choices.share) != 1 + len(choices.mix):
        raise click.UsageError("Pass --share once for DS and once for each --mix, in that order.")
    if not choices.given().keys() - {"seed", "outcome", "share"}:
        hint = (
            "select trajectories with --where 'return > 0', --drop-zero-variance, --drop-failed, "
            "--max-tokens N or --sample-groups N, or change the dataset with --mask-overlong or "
            "--mix DS3"
        )
        raise HintedUsageError("no filter is given", hint)


def filters_of(choices: Choices, found: pl.DataFrame | None) -> list[Filter]:
    """Return the filters, in the order in which they apply.

    Args:
        choices: The options.
        found: Overlaps with `choices.overlap`.
    """
    from pipelines.filtering import filters
    from pipelines.filtering.near_duplicates import near_duplicates
    from pipelines.filtering.overlap import overlapping

    rules = [filters.where(condition) for condition in choices.where]
    if choices.drop_failed_groups:
        rules.append(filters.failed("group"))
    if choices.drop_failed:
        rules.append(filters.failed())
    if choices.drop_unknown:
        rules.append(filters.unknown_return())
    if choices.max_staleness is not None and choices.policy_version is not None:
        rules.append(filters.stale(choices.policy_version, choices.max_staleness))
    if (choices.min_tokens, choices.max_tokens) != (None, None):
        rules.append(filters.token_range(choices.min_tokens, choices.max_tokens))
    if (choices.min_steps, choices.max_steps) != (None, None):
        rules.append(filters.step_range(choices.min_steps, choices.max_steps))
    if (choices.min_reward, choices.max_reward) != (None, None):
        rules.append(filters.reward_range(choices.min_reward, choices.max_reward))
    if (choices.min_pass_rate, choices.max_pass_rate) != (None, None):
        rules.append(filters.pass_rate_range(choices.min_pass_rate, choices.max_pass_rate))
    if choices.dedup is not None:
        rules.append(filters.duplicates(choices.dedup))
    if choices.dedup is not None and choices.dedup_similarity is not None:
        rules.append(near_duplicates(choices.dedup_similarity, choices.dedup))
    if found is not None and choices.overlap is not None:
        rules.append(overlapping(found, choices.overlap))
    if choices.drop_overlong:
        rules.append(filters.overlong())
    if choices.drop_zero_variance:
        rules.append(filters.zero_variance())
    if choices.best is not None:
        rules.append(filters.best_of_group(choices.best))
    if choices.sample_groups is not None and not choices.mix:
        rules.append(filters.sample_groups(choices.sample_groups, choices.seed))
    return list({rule.name: rule for rule in rules}.values())


def masks_of(choices: Choices) -> list[Filter]:
    """Return the filters whose trajectories are masked."""
    from pipelines.filtering import filters

    found = [filters.overlong()] if choices.mask_overlong else []
    if choices.mask_failed_groups:
        found.append(filters.failed("group"))
    if choices.mask_failed:
        found.append(filters.failed())
    return found
