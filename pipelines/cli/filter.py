"""The `rollouts filter` command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipelines.cli.filter_choices import Choices, check_usage, filters_of, masks_of
from rollout_io.cli.datasets import dataset_argument, layout_option
from rollout_io.cli.output import emit, emit_json, example, next_command, note, progress_bar
from rollout_io.cli.usage import Number
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


WHOLE, SHARE, NUMBER = click.IntRange(min=0), Number(0, 1), Number()
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
@click.option(
    "--where",
    multiple=True,
    metavar="SQL",
    help="Keep matching trajectories: \"return > 0 AND any(agent = 'main')\".",
)
@click.option("--drop-failed-groups", is_flag=True, help="Drop groups with a failed trajectory.")
@click.option("--drop-failed", is_flag=True, help="Drop failed trajectories.")
@click.option(
    "--drop-unknown", is_flag=True, help="Drop trajectories that did not fail but have no return."
)
@click.option(
    "--max-staleness", type=WHOLE, metavar="N", help="Drop trajectories more than N versions old."
)
@click.option(
    "--policy-version", type=WHOLE, metavar="V", help="Current policy version, for --max-staleness."
)
@click.option(
    "--min-tokens",
    type=WHOLE,
    metavar="N",
    help="Minimum length of the longest sequence, in tokens.",
)
@click.option(
    "--max-tokens",
    type=WHOLE,
    metavar="N",
    help="Maximum length of the longest sequence, in tokens.",
)
@click.option("--min-steps", type=WHOLE, metavar="N", help="Minimum number of steps.")
@click.option("--max-steps", type=WHOLE, metavar="N", help="Maximum number of steps.")
@click.option(
    "--min-reward", type=NUMBER, metavar="X", help="Minimum return; drops unknown returns too."
)
@click.option(
    "--max-reward", type=NUMBER, metavar="X", help="Maximum return; drops unknown returns too."
)
@click.option(
    "--min-pass-rate",
    type=SHARE,
    metavar="X",
    help="Minimum share of a group's attempts with a return above 0.",
)
@click.option(
    "--max-pass-rate",
    type=SHARE,
    metavar="X",
    help="Maximum share of a group's attempts with a return above 0.",
)
@click.option(
    "--dedup",
    type=click.Choice(["group", "dataset"]),
    help="Drop exact duplicates in each group or in the dataset.",
)
@click.option(
    "--dedup-similarity",
    type=NUMBER,
    metavar="X",
    help="With --dedup: also drop trajectories that share this part of their token sequences.",
)
@click.option(
    "--overlap",
    type=click.Path(),
    metavar="EVAL",
    help="Drop trajectories that contain most of a text of this evaluation set (JSON Lines).",
)
@click.option("--drop-overlong", is_flag=True, help="Drop trajectories that were cut off.")
@click.option("--drop-zero-variance", is_flag=True, help="Drop groups whose returns are all equal.")
@click.option(
    "--best",
    type=click.IntRange(min=1),
    metavar="N",
    help="Keep the N highest returns of each group; drops unknown returns too.",
)
@click.option(
    "--sample-groups",
    type=WHOLE,
    metavar="N",
    help="Draw N groups at random, from the mixture if there is one.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed for drawing groups.")
@click.option(
    "--mask-overlong", is_flag=True, help="Do not train on trajectories that were cut off."
)
@click.option("--mask-failed-groups", is_flag=True, help="Do not train on groups with a failure.")
@click.option("--mask-failed", is_flag=True, help="Do not train on failed trajectories.")
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
@click.option(
    "--outcome",
    type=click.Choice(["last", "sum"]),
    help="Return of a trajectory: its last step's reward, or the sum over its steps.  [default: "
    "from the dataset, else last]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def filter_(dataset: str, out: str | None, *, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Select the trajectories to train on; mask the rest, or mix in other datasets.

    Filters apply in the order listed below, each to the trajectories that earlier filters kept;
    then masks, then mixing. Only --keep-rows drops single rows; all other filters drop complete
    trajectories. The report counts the trajectories and groups that each filter dropped or masked.
    Memory use grows with the number of trajectories, not with their length.
    """
    from rollout_io.dataset.sources import Sources

    choices = Choices(**options)
    check_usage(out, choices, dry_run=dry_run)
    if out is not None:
        _refuse_inside(out, (dataset, *choices.mix))
    read_from = Sources(dataset, *choices.mix, may_grow=True)
    sources = [_Source.decide(path, choices) for path in (dataset, *choices.mix)]
    frame, mixture = _combined(sources, choices)
    if not dry_run:
        assert out is not None
        _write(frame, out, sources, choices, read_from)
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
    def decide(cls, path: str, choices: Choices) -> _Source:
        from pipelines.filtering.row_removal import keep_rows
        from pipelines.filtering.verdicts import apply_filters, apply_masks
        from rollout_io.cli.datasets import open_valid
        from rollout_io.dataset.returns import dataset_outcome

        frame, outcome = open_valid(path), dataset_outcome(path, choices.outcome)
        num_unscored = 0
        if choices.reward is not None:
            from pipelines.rescoring.versions import read_version, with_version

            frame = with_version(frame, path, choices.reward)
            num_unscored = read_version(path, choices.reward)[0]["reward"].null_count()
        rows: dict[str, int] = {}
        if choices.keep_rows is not None:
            move = choices.move_outcome
            frame, rows = keep_rows(frame, choices.keep_rows, outcome=outcome, move_outcome=move)
        found = None if choices.overlap is None else _overlaps(path, frame, choices.overlap)
        frame, dropped = apply_filters(frame, filters_of(choices, found), outcome)
        frame, masked = apply_masks(frame, masks_of(choices), outcome)
        return cls(
            path=path,
            frame=frame,
            num_unscored=num_unscored,
            rows=rows,
            dropped=dropped,
            masked=masked,
            overlaps=found,
        )

    def as_json(self) -> dict[str, Any]:
        lists = {"filters": self.dropped.to_dicts(), "masks": self.masked.to_dicts()}
        found = {} if self.overlaps is None else {"overlaps": self.overlaps.to_dicts()}
        counts = {"num_unscored": self.num_unscored, "rows": self.rows}
        return {"dataset": self.path, **counts, **lists, **found}

    def lines(self) -> Iterator[str]:
        yield self.path
        if self.num_unscored:
            without = count(self.num_unscored, "trajectory")
            yield f"  reward: {without} without a score, which count as failed"
        if self.rows:
            yield "  rows: {num_rows_dropped:,} of {num_rows_before:,} dropped".format(**self.rows)
        for verb, counts in {"dropped": self.dropped, "masked": self.masked}.items():
            for name, before, found, groups, gone in counts.rows():
                yield (
                    f"  {name}: {found:,} of {count(before, 'trajectory')} {verb}, "
                    f"including {gone:,} of {count(groups, 'group')} entirely"
                )
        if self.overlaps is not None:
            for name, line, share in self.overlaps.head(_SHOWN_OVERLAPS).rows():
                yield f"    {name} contains {share:.0%} of a text of line {line:,}"
            if len(self.overlaps) > _SHOWN_OVERLAPS:
                yield f"    and {len(self.overlaps) - _SHOWN_OVERLAPS:,} more: --json lists all"


def _refuse_inside(out: str, datasets: Sequence[str]) -> None:
    from rollout_io.dataset.storage import refuse_inside

    for dataset in datasets:
        refuse_inside(out, dataset)


def _overlaps(dataset: str, frame: pl.LazyFrame, evaluation: str) -> pl.DataFrame:
    from pipelines.filtering.overlap import overlaps
    from rollout_io.dataset.opening import open_input
    from rollout_io.dataset.reader import read_metadata
    from rollout_io.retokenize.local import remembered_tokenizer
    from rollout_io.retokenize.token_bytes import load_token_bytes

    with open_input(Path(evaluation)):  # a missing file is reported before a missing tokenizer
        pass
    tokenizer = remembered_tokenizer(read_metadata(dataset))
    if tokenizer is None:
        got = "the tokenizer of the dataset is unknown, or not on this machine"
        hint = "convert the log again with --tokenizer DIR"
        raise InputError("tokenizer", dataset, got, "its tokenizer, to compare texts", hint)
    return overlaps(frame, evaluation, load_token_bytes(tokenizer))


def _combined(
    sources: Sequence[_Source], choices: Choices
) -> tuple[pl.LazyFrame, list[dict[str, Any]]]:
    """Mix the sources into the frame to write, and report the mixture."""
    from pipelines.mixing import mix

    if len(sources) == 1 and not choices.prefix_names:
        return sources[0].frame, []
    names = [Path(source.path).name for source in sources]
    if len(set(names)) < len(names):
        names = [source.path for source in sources]
    if len(set(names)) < len(names):
        got, hint = "the same dataset is given twice", "list each dataset once"
        raise InputError("unique_group", "--mix", got, hint=hint)
    frames = {name: _with_sampling(source) for name, source in zip(names, sources, strict=True)}
    shares = dict(zip(names, choices.share, strict=True)) if choices.share else None
    num = choices.sample_groups if choices.mix else None
    prefix, seed = choices.prefix_names, choices.seed
    frame, counts = mix(frames, shares=shares, num_groups=num, seed=seed, prefix_names=prefix)
    return frame, counts.to_dicts()


def _with_sampling(source: _Source) -> pl.LazyFrame:
    """Add the sampling settings from the dataset's history as a column.

    A mixture keeps the history of only one dataset; the settings of the others would be lost.
    """
    import polars as pl

    from rollout_io.dataset.reader import read_metadata
    from rollout_io.formats.parsing.sampling import sampling_extra_of

    if "sampling_extra" in source.frame.collect_schema():
        return source.frame
    said = sampling_extra_of(read_metadata(source.path).made_by)
    return source.frame.with_columns(sampling_extra=pl.lit(said)) if said else source.frame


def _write(
    frame: pl.LazyFrame,
    out: str,
    sources: Sequence[_Source],
    choices: Choices,
    read_from: Sources,
) -> None:
    import polars as pl

    from rollout_io.dataset.reader import read_layout, read_metadata
    from rollout_io.dataset.writer import RolloutWriter

    paths = [source.path for source in sources]
    found = {path: read_metadata(path) for path in paths}
    metadata = _common(found, choices.outcome).made("filter", parents=paths, **choices.given())
    num_rows = frame.select(pl.len()).collect(engine="streaming").item()
    progress = progress_bar(num_rows, " rows", "filter")
    layout = choices.layout or read_layout(sources[0].path)
    writing = RolloutWriter(out, layout=layout, metadata=metadata, parents=paths)
    with writing as writer, progress as bar:
        for rows in frame.collect_batches(engine="streaming"):
            writer.write(rows)
            bar(len(rows))
        read_from.refuse_changed()


def _common(found: dict[str, DatasetMetadata], outcome: Outcome | None) -> DatasetMetadata:
    """Combine the metadata of the datasets to mix; fields that differ become unknown."""
    from schemas.metadata import common

    returns = {path: outcome or metadata.outcome or "last" for path, metadata in found.items()}
    if len(set(returns.values())) > 1:
        got = ", ".join(f"outcome {value} in {path}" for path, value in returns.items())
        hint = "pass --outcome sum or --outcome last for all datasets"
        message = f"--mix: the datasets define returns differently: {got}"
        raise InputError("file_metadata", "--mix", got, hint=hint, message=message)
    made = common(found, {"tokenizer_fingerprint", "logprobs_mode"})
    return made.replace(outcome=outcome or made.outcome)
