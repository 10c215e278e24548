"""The `rollouts filter` command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipelines.cli import outcome_option
from pipelines.cli.filter_rules import (
    MASKS,
    NUMBER,
    RULES,
    Options,
    check_usage,
    chosen_filters,
    given,
    rule_options,
)
from rollout_io.cli.options import dataset_argument, layout_option
from rollout_io.cli.output import emit, emit_json, example, next_command, note, progress_bar
from schemas.errors import InputError, count

if TYPE_CHECKING:
    import polars as pl

    from rollout_io.dataset.sources import Sources
    from schemas.metadata import DatasetMetadata, Outcome

EXAMPLES = example(
    "rollouts filter shop/ --drop-zero-variance --mask-overlong --out small/"
    "\n  rollouts filter shop/ --where \"return > 0 AND any(agent = 'main')\" --out wins/"
    "\n  rollouts filter math/ --mix code/ --share 0.7 --share 0.3 --out mixed/"
)

_SHOWN_OVERLAPS = 5


@click.command("filter", short_help="Select or mask trajectories; mix datasets.", epilog=EXAMPLES)
@dataset_argument()
@click.option("--out", metavar="DS2", help="Directory of the new dataset.")
@click.option("--dry-run", is_flag=True, help="Print the report; write nothing.")
@click.option("--reward", metavar="NAME", help="Use this reward version (`rollouts rescore`).")
@click.option("--keep-rows", metavar="SQL", help="Keep only matching rows; renumber the steps.")
@click.option(
    "--move-outcome", is_flag=True, help="With --keep-rows: move the return to the last kept row."
)
@rule_options
@click.option(
    "--mix",
    multiple=True,
    metavar="DS3",
    help="Mix in another dataset, filtered the same way; may be repeated.",
)
@click.option(
    "--share",
    multiple=True,
    type=NUMBER,
    metavar="X",
    help="Fraction of the mixture's groups to take from a dataset; pass one value for DS, then one "
    "per --mix.",
)
@layout_option
@click.option("--prefix-names", is_flag=True, help="Prefix instance ids with the dataset's name.")
@outcome_option
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def filter_(dataset: str, out: str | None, *, dry_run: bool, as_json: bool, **values: Any) -> None:
    """Select the trajectories to train on; mask the rest, or mix in other datasets.

    Filters apply in the order listed below, each to the trajectories that earlier filters kept;
    then masks, then mixing. Only --keep-rows drops single rows; all other filters drop complete
    trajectories. The report counts the trajectories and groups that each filter dropped or masked.
    Memory use grows with the number of trajectories, not with their length.
    """
    from rollout_io.dataset.sources import Sources
    from rollout_io.dataset.storage import refuse_inside

    check_usage(out, values, dry_run=dry_run)
    if out is not None:
        for path in (dataset, *values["mix"]):
            refuse_inside(out, path)
    read_from = Sources(dataset, *values["mix"], may_grow=True)
    sources = [_Source.decide(path, values) for path in (dataset, *values["mix"])]
    frame, mixture = _combined(sources, values)
    if not dry_run:
        assert out is not None
        _write(frame, out, sources, values, read_from)
    if as_json:
        reports = [source.as_json() for source in sources]
        emit_json({"datasets": reports, "mixture": mixture})
        return
    tell = emit if dry_run else note  # the report is a dry run's only output
    for source in sources:
        for line in source.lines():
            tell(line)
    for part in mixture:
        tell(
            "mixture: {num_groups:,} of {num_groups_before:,} groups of {dataset}, ".format(**part)
            + count(part["num_trajectories"], "trajectory")
        )
    if out is not None and not dry_run:
        next_command("rollouts", "stats", out)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """One dataset with its filters and masks applied."""

    path: str
    frame: pl.LazyFrame
    num_unscored: int
    rows: dict[str, int]
    dropped: pl.DataFrame
    masked: pl.DataFrame
    overlaps: pl.DataFrame | None

    @classmethod
    def decide(cls, path: str, values: Options) -> _Source:
        from pipelines.filtering import apply_filters, apply_masks, keep_rows
        from rollout_io.cli.options import open_valid
        from rollout_io.dataset.trajectory_facts import dataset_outcome

        frame, outcome = open_valid(path), dataset_outcome(path, values["outcome"])
        num_unscored = 0
        if values["reward"] is not None:
            from pipelines.rewards import with_version
            from rollout_io.dataset.versions import read_version

            frame = with_version(frame, path, values["reward"])
            num_unscored = read_version(path, values["reward"])[0]["reward"].null_count()
        rows: dict[str, int] = {}
        if values["keep_rows"] is not None:
            move = values["move_outcome"]
            frame, rows = keep_rows(frame, values["keep_rows"], outcome=outcome, move_outcome=move)
        overlapping = (
            None if values["overlap"] is None else _overlaps(path, frame, values["overlap"])
        )
        of_dataset = {
            **values,
            "where": tuple((one, path) for one in values["where"]),
            "overlap": None if overlapping is None else (overlapping, values["overlap"]),
            "sample_groups": None if values["mix"] else values["sample_groups"],
        }
        frame, dropped = apply_filters(frame, chosen_filters(of_dataset, RULES), outcome)
        frame, masked = apply_masks(frame, chosen_filters(of_dataset, MASKS), outcome)
        return cls(
            path=path,
            frame=frame,
            num_unscored=num_unscored,
            rows=rows,
            dropped=dropped,
            masked=masked,
            overlaps=overlapping,
        )

    def as_json(self) -> dict[str, Any]:
        lists = {"filters": self.dropped.to_dicts(), "masks": self.masked.to_dicts()}
        overlaps = {} if self.overlaps is None else {"overlaps": self.overlaps.to_dicts()}
        counts = {"num_unscored": self.num_unscored, "rows": self.rows}
        return {"dataset": self.path, **counts, **lists, **overlaps}

    def lines(self) -> Iterator[str]:
        yield self.path
        if self.num_unscored:
            without = count(self.num_unscored, "trajectory")
            yield f"  reward: {without} without a score, which count as failed"
        if self.rows:
            yield "  rows: {num_rows_dropped:,} of {num_rows_before:,} dropped".format(**self.rows)
        for verb, counts in {"dropped": self.dropped, "masked": self.masked}.items():
            for name, before, num_matching, groups, gone in counts.rows():
                yield (
                    f"  {name}: {num_matching:,} of {count(before, 'trajectory')} {verb}, "
                    f"including {gone:,} of {count(groups, 'group')} entirely"
                )
        if self.overlaps is not None:
            for name, line, share in self.overlaps.head(_SHOWN_OVERLAPS).rows():
                yield f"    {name} contains {share:.0%} of a text of line {line:,}"
            if len(self.overlaps) > _SHOWN_OVERLAPS:
                yield f"    and {len(self.overlaps) - _SHOWN_OVERLAPS:,} more: --json lists all"


def _overlaps(dataset: str, frame: pl.LazyFrame, evaluation: str) -> pl.DataFrame:
    from pipelines.similarity import overlaps
    from rollout_io.dataset.opening import open_input
    from rollout_io.dataset.reader import read_metadata
    from rollout_io.retokenize.local import remembered_tokenizer
    from rollout_io.retokenize.token_bytes import load_token_bytes

    with open_input(Path(evaluation)):  # a missing file is reported before a missing tokenizer
        pass
    tokenizer = remembered_tokenizer(read_metadata(dataset))
    if tokenizer is None:
        finding = "the tokenizer of the dataset is unknown, or not on this machine"
        hint = "convert the log again with --tokenizer DIR"
        raise InputError("tokenizer", dataset, finding, "its tokenizer, to compare texts", hint)
    return overlaps(frame, evaluation, load_token_bytes(tokenizer))


def _combined(
    sources: Sequence[_Source], values: Options
) -> tuple[pl.LazyFrame, list[dict[str, Any]]]:
    """Mix the sources into the frame to write, and report the mixture."""
    from pipelines.mixing import mix

    if len(sources) == 1 and not values["prefix_names"]:
        return sources[0].frame, []
    names = [Path(source.path).name for source in sources]
    if len(set(names)) < len(names):
        names = [source.path for source in sources]
    if len(set(names)) < len(names):
        finding, hint = "the same dataset is given twice", "list each dataset once"
        raise InputError("unique_group", "--mix", finding, hint=hint)
    frames = {name: _with_sampling(source) for name, source in zip(names, sources, strict=True)}
    shares = dict(zip(names, values["share"], strict=True)) if values["share"] else None
    num = values["sample_groups"] if values["mix"] else None
    prefix, seed = values["prefix_names"], values["seed"]
    frame, counts = mix(frames, shares=shares, num_groups=num, seed=seed, prefix_names=prefix)
    return frame, counts.to_dicts()


def _with_sampling(source: _Source) -> pl.LazyFrame:
    """Add the sampling settings from the dataset's history as a column.

    A mixture keeps the history of only one dataset; the settings of the others would be lost.
    """
    import polars as pl

    from pipelines.sampling_defaults import sampling_extra_of
    from rollout_io.dataset.reader import read_metadata

    if "sampling_extra" in source.frame.collect_schema():
        return source.frame
    extra = sampling_extra_of(read_metadata(source.path).made_by)
    return source.frame.with_columns(sampling_extra=pl.lit(extra)) if extra else source.frame


def _write(
    frame: pl.LazyFrame,
    out: str,
    sources: Sequence[_Source],
    values: Options,
    read_from: Sources,
) -> None:
    import polars as pl

    from rollout_io.dataset.reader import read_layout, read_metadata
    from rollout_io.dataset.writer import RolloutWriter

    paths = [source.path for source in sources]
    metadata_of = {path: read_metadata(path) for path in paths}
    metadata = _common(metadata_of, values["outcome"]).made(
        "filter", parents=paths, **given(values)
    )
    num_rows = frame.select(pl.len()).collect(engine="streaming").item()
    progress = progress_bar(num_rows, " rows", "filter")
    layout = values["layout"] or read_layout(sources[0].path)
    writing = RolloutWriter(out, layout=layout, metadata=metadata, parents=paths)
    with writing as writer, progress as bar:
        for rows in frame.collect_batches(engine="streaming"):
            writer.write(rows)
            bar(len(rows))
        read_from.refuse_changed()


def _common(metadata_of: dict[str, DatasetMetadata], outcome: Outcome | None) -> DatasetMetadata:
    """Combine the metadata of the datasets to mix; fields that differ become unknown."""
    from schemas.metadata import common

    returns = {
        path: outcome or metadata.outcome or "last" for path, metadata in metadata_of.items()
    }
    if len(set(returns.values())) > 1:
        finding = ", ".join(f"outcome {value} in {path}" for path, value in returns.items())
        hint = "pass --outcome sum or --outcome last for all datasets"
        message = f"--mix: the datasets define returns differently: {finding}"
        raise InputError("file_metadata", "--mix", finding, hint=hint, message=message)
    shared = common(metadata_of, {"tokenizer_fingerprint", "logprobs_mode"})
    return shared.replace(outcome=outcome or shared.outcome)
