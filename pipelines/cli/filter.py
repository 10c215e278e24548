"""`rollouts filter`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rollout_io.cli.output import emit_json, example, next_command, note, progress_bar
from schemas.errors import RolloutError

if TYPE_CHECKING:
    import polars as pl

    from pipelines.verdicts import Filter
    from schemas.metadata import DatasetMetadata

EXAMPLES = example(
    "rollouts filter shop/ --drop-zero-variance --mask-overlong --out small/"
    "\n  rollouts filter shop/ --where \"reward > 0 AND agent = 'main'\" --out wins/"
    "\n  rollouts filter math/ --mix code/ --share 0.7 --share 0.3 --out mixed/"
)
SAID_OF_A_MIXTURE = {
    "tokenizer_fingerprint": True,
    "logprobs_mode": True,
    "tokenizer": False,
    "chat_template_fingerprint": False,
}
"""Metadata that describe the rows, and whether datasets that differ in them are not mixed."""

WHOLE = click.IntRange(min=0)


@click.command("filter", epilog=EXAMPLES)
@click.argument("dataset", metavar="DS")
@click.option("--out", metavar="DS2", help="Directory of the new dataset.")
@click.option("--dry-run", is_flag=True, help="Report only; write nothing.")
@click.option("--keep-rows", metavar="SQL", help="Drop other rows, and number the steps anew.")
@click.option(
    "--move-outcome",
    is_flag=True,
    help="With --keep-rows: the return moves to the last row left (0 before it).",
)
@click.option("--where", multiple=True, metavar="SQL", help="Any row matches, e.g. 'reward > 0'.")
@click.option("--where-all", multiple=True, metavar="SQL", help="All rows match.")
@click.option("--drop-failed-groups", is_flag=True, help="Drop groups with a failed trajectory.")
@click.option("--drop-failed", is_flag=True, help="Drop failed trajectories.")
@click.option("--drop-unknown", is_flag=True, help="Drop those without return and without error.")
@click.option("--max-staleness", type=WHOLE, metavar="N", help="Policy versions behind, at most.")
@click.option("--policy-version", type=WHOLE, metavar="V", help="The current policy version.")
@click.option("--min-tokens", type=WHOLE, metavar="N", help="Longest prompt + response, from N.")
@click.option("--max-tokens", type=WHOLE, metavar="N", help="Longest prompt + response, to N.")
@click.option("--min-steps", type=WHOLE, metavar="N", help="Steps, from N.")
@click.option("--max-steps", type=WHOLE, metavar="N", help="Steps, to N.")
@click.option("--min-reward", type=float, metavar="X", help="Return, from X; null is outside.")
@click.option("--max-reward", type=float, metavar="X", help="Return, to X; null is outside.")
@click.option(
    "--dedup", type=click.Choice(["group", "dataset"]), help="Drop exact repeats within these."
)
@click.option("--drop-overlong", is_flag=True, help="Drop those whose last step was cut off.")
@click.option("--drop-zero-variance", is_flag=True, help="Drop groups whose returns are equal.")
@click.option("--sample-groups", type=WHOLE, metavar="N", help="Draw N groups (of the mixture).")
@click.option("--seed", type=int, default=0, show_default=True, help="Draws the groups.")
@click.option("--mask-overlong", is_flag=True, help="No loss where the last step was cut off.")
@click.option("--mask-failed-groups", is_flag=True, help="No loss on groups with a failed one.")
@click.option("--mask-failed", is_flag=True, help="No loss on failed trajectories.")
@click.option("--mix", multiple=True, metavar="DS3", help="Mix in another dataset, filtered alike.")
@click.option(
    "--share",
    multiple=True,
    type=float,
    metavar="X",
    help="Share of the groups: of DS, then of each --mix.",
)
@click.option("--prefix-names", is_flag=True, help="Put the dataset's name before instance ids.")
@click.option(
    "--outcome",
    type=click.Choice(["last", "sum"]),
    default="last",
    show_default=True,
    help="Return of a trajectory: its last step's reward, or the sum over its steps.",
)
@click.option("--json", "as_json", is_flag=True, help="The report as JSON on stdout.")
def filter_(dataset: str, out: str | None, *, dry_run: bool, as_json: bool, **given: Any) -> None:
    """Keep the trajectories that should train; mask or mix others.

    Filters apply in the order below, each to what those before it have left; masks follow, then the
    mixture. Trajectories go whole, unless --keep-rows is given. The report says how many each one
    found. Memory use grows with the number of trajectories, not with their tokens.
    """
    _check_usage(out, dry_run=dry_run, given=given)
    sources = [_Source.decide(path, given) for path in (dataset, *given["mix"])]
    frame, mixture = _combined(sources, given)
    if not dry_run:
        assert out is not None
        _write(frame, out, sources, given)
    if as_json:
        reports = [source.as_json() for source in sources]
        emit_json({"datasets": reports, "mixture": mixture})
        return
    for source in sources:
        source.print()
    for line in mixture:
        note(
            "mixture: {num_groups:,} of {num_groups_before:,} groups of {dataset}, "
            "{num_trajectories:,} trajectories".format(**line)
        )
    if out is not None and not dry_run:
        next_command(f"rollouts stats {out}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """One dataset and what is decided about it."""

    path: str
    frame: pl.LazyFrame
    rows: dict[str, int]
    dropped: pl.DataFrame
    masked: pl.DataFrame

    @classmethod
    def decide(cls, path: str, given: dict[str, Any]) -> _Source:
        from pipelines.masks import apply_masks
        from pipelines.rows import keep_rows
        from pipelines.verdicts import apply_filters
        from rollout_io.cli.dataset import open_dataset

        frame, outcome = open_dataset(path), given["outcome"]
        rows: dict[str, int] = {}
        if given["keep_rows"] is not None:
            move = given["move_outcome"]
            frame, rows = keep_rows(frame, given["keep_rows"], outcome=outcome, move_outcome=move)
        frame, dropped = apply_filters(frame, _filters(given), outcome)
        frame, masked = apply_masks(frame, _masks(given), outcome)
        return cls(path=path, frame=frame, rows=rows, dropped=dropped, masked=masked)

    def as_json(self) -> dict[str, Any]:
        lists = {"filters": self.dropped.to_dicts(), "masks": self.masked.to_dicts()}
        return {"dataset": self.path, "rows": self.rows, **lists}

    def print(self) -> None:
        note(self.path)
        if self.rows:
            note("  rows: {num_rows_dropped:,} of {num_rows_before:,} dropped".format(**self.rows))
        for verb, counts in {"dropped": self.dropped, "masked": self.masked}.items():
            for name, before, found, groups, gone in counts.rows():
                note(
                    f"  {name}: {found:,} of {before:,} trajectories {verb}, "
                    f"{gone:,} of {groups:,} groups whole"
                )


def _check_usage(out: str | None, *, dry_run: bool, given: dict[str, Any]) -> None:
    if out is None and not dry_run:
        raise click.UsageError("Missing option '--out' (or --dry-run).")
    if (given["max_staleness"] is None) != (given["policy_version"] is None):
        raise click.UsageError("--max-staleness and --policy-version go together.")
    if given["move_outcome"] and given["keep_rows"] is None:
        raise click.UsageError("--move-outcome goes with --keep-rows.")
    if given["share"] and len(given["share"]) != 1 + len(given["mix"]):
        raise click.UsageError("--share is given for DS and for each --mix, in this order.")


def _filters(given: dict[str, Any]) -> list[Filter]:
    from pipelines import filters

    found = [filters.where(condition) for condition in given["where"]]
    found += [filters.where(condition, rows="all") for condition in given["where_all"]]
    if given["drop_failed_groups"]:
        found.append(filters.failed("group"))
    if given["drop_failed"]:
        found.append(filters.failed())
    if given["drop_unknown"]:
        found.append(filters.unknown_return())
    if given["max_staleness"] is not None:
        found.append(filters.stale(given["policy_version"], given["max_staleness"]))
    ranges = {
        "tokens": filters.token_range,
        "steps": filters.step_range,
        "reward": filters.reward_range,
    }
    for name, between in ranges.items():
        ends = given[f"min_{name}"], given[f"max_{name}"]
        if ends != (None, None):
            found.append(between(*ends))
    if given["dedup"] is not None:
        found.append(filters.duplicates(given["dedup"]))
    if given["drop_overlong"]:
        found.append(filters.overlong())
    if given["drop_zero_variance"]:
        found.append(filters.zero_variance())
    if given["sample_groups"] is not None and not given["mix"]:
        found.append(filters.sample_groups(given["sample_groups"], given["seed"]))
    return list({rule.name: rule for rule in found}.values())


def _masks(given: dict[str, Any]) -> list[Filter]:
    from pipelines import filters

    found = [filters.overlong()] if given["mask_overlong"] else []
    if given["mask_failed_groups"]:
        found.append(filters.failed("group"))
    if given["mask_failed"]:
        found.append(filters.failed())
    return found


def _combined(
    sources: Sequence[_Source], given: dict[str, Any]
) -> tuple[pl.LazyFrame, list[dict[str, Any]]]:
    """The one frame to write, and the report of the mixture."""
    from pipelines.mixing import mix

    if len(sources) == 1 and not given["prefix_names"]:
        return sources[0].frame, []
    names = [Path(source.path).name for source in sources]
    if len(set(names)) < len(names):
        names = [source.path for source in sources]
    if len(set(names)) < len(names):
        hint = "give each dataset once"
        raise RolloutError("unique_group", "--mix", "the same dataset twice", "others", hint)
    frames = {name: source.frame for name, source in zip(names, sources, strict=True)}
    shares = dict(zip(names, given["share"], strict=True)) if given["share"] else None
    num = given["sample_groups"] if given["mix"] else None
    prefix = given["prefix_names"]
    frame, counts = mix(
        frames, shares=shares, num_groups=num, seed=given["seed"], prefix_names=prefix
    )
    return frame, counts.to_dicts()


def _write(
    frame: pl.LazyFrame, out: str, sources: Sequence[_Source], given: dict[str, Any]
) -> None:
    import polars as pl

    from rollout_io.reader import read_metadata
    from rollout_io.writer import RolloutWriter

    paths = [source.path for source in sources]
    asked = {name: v for name, v in given.items() if v is not None and v is not False and v != ()}
    found = {path: read_metadata(path) for path in paths}
    metadata = _common(found).made("filter", parents=paths, **asked)
    num_rows = frame.select(pl.len()).collect(engine="streaming").item()
    progress = progress_bar(num_rows, " rows", "filter")
    with RolloutWriter(out, metadata=metadata) as writer, progress as bar:
        for rows in frame.collect_batches(engine="streaming"):
            writer.write(rows)
            bar(len(rows))


def _common(found: dict[str, DatasetMetadata]) -> DatasetMetadata:
    """What all datasets say alike; unknown where they do not, or refused where they must."""
    first = next(iter(found.values()))
    for name, refused in SAID_OF_A_MIXTURE.items():
        said = {path: getattr(metadata, name) for path, metadata in found.items()}
        known = [path for path, value in said.items() if value is not None]
        differs = [path for path in known if said[path] != said[known[0]]]
        if differs and refused:
            where, got = f"{known[0]} and {differs[0]}", f"different {name}"
            hint = "convert one of them again, to what the other has"
            raise RolloutError("file_metadata", where, got, "the same in all", hint)
        if differs or len(known) < len(said):
            first = first.replace(**{name: None})
    return first
