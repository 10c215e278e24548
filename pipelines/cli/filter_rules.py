"""The rules of `rollouts filter`: its options, and the filters that each stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click

from rollout_io.cli.options import HintedUsageError, Number

if TYPE_CHECKING:
    import polars as pl

    from pipelines.filtering import Filter

WHOLE, NUMBER = click.IntRange(min=0), Number()

Option = tuple[str, dict[str, Any]]
Options = Mapping[str, Any]
"""Values of all options by name, as click returns them."""


class FilterOptions:
    """Options that are one filter.

    Args:
        build: Returns the filters; called with `pipelines.filters` and the values of the
            options if one of them is passed.
        options: Names of options, with the settings of `click.option`.
    """

    def __init__(self, build: Callable[..., list[Filter]], *options: Option) -> None:
        self.build, self.options = build, dict(options)


def _option(name: str, text: str, **settings: Any) -> Option:
    return name, {"help": text, **settings}


def _flag(name: str, text: str, function: str, *arguments: Any) -> FilterOptions:
    """Return the rule of a flag that stands for a function of `pipelines.filters`."""
    return FilterOptions(
        lambda filters, _: [getattr(filters, function)(*arguments)],
        _option(name, text, is_flag=True),
    )


def _range(noun: str, kind: Any, text: str) -> FilterOptions:
    """Return the rule of a minimum and a maximum, which `NOUN_range` takes."""
    bounds = (
        _option(f"--{end[:3].lower()}-{noun}", f"{end} {text}", type=kind, metavar=metavar)
        for end in ("Minimum", "Maximum")
        for metavar in ("N" if kind is WHOLE else "X")
    )
    function = f"{noun.removesuffix('s').replace('-', '_')}_range"
    return FilterOptions(lambda filters, *values: [getattr(filters, function)(*values)], *bounds)


def _duplicates(filters: ModuleType, within: Any, similarity: float | None) -> list[Filter]:
    from pipelines.similarity import near_duplicates

    exact = filters.duplicates(within)
    return [exact] if similarity is None else [exact, near_duplicates(similarity, within)]


def _overlap(_: ModuleType, chosen: tuple[pl.DataFrame, str]) -> list[Filter]:
    from pipelines.similarity import overlapping

    return [overlapping(*chosen)]


_WHERE = "Keep matching trajectories: \"return > 0 AND any(agent = 'main')\"."
_SIMILAR = "With --dedup: also drop trajectories that share this part of their token sequences."
_OVERLAP = "Drop trajectories that contain most of a text of this evaluation set (JSON Lines)."
_SAMPLE = "Draw N groups at random, from the mixture if there is one."

RULES = (
    FilterOptions(
        lambda filters, conditions: [filters.where(*one) for one in conditions],
        _option("--where", _WHERE, multiple=True, metavar="SQL"),
    ),
    _flag("--drop-failed-groups", "Drop groups with a failed trajectory.", "failed", "group"),
    _flag("--drop-failed", "Drop failed trajectories.", "failed"),
    _flag(
        "--drop-unknown",
        "Drop trajectories that did not fail but have no return.",
        "unknown_return",
    ),
    FilterOptions(
        lambda filters, most, version: [filters.stale(version, most)],
        _option(
            "--max-staleness",
            "Drop trajectories more than N versions old.",
            type=WHOLE,
            metavar="N",
        ),
        _option(
            "--policy-version",
            "Current policy version, for --max-staleness.",
            type=WHOLE,
            metavar="V",
        ),
    ),
    _range("tokens", WHOLE, "length of the longest sequence, in tokens."),
    _range("steps", WHOLE, "number of steps."),
    _range("reward", NUMBER, "return; drops unknown returns too."),
    _range("pass-rate", Number(0, 1), "share of a group's attempts with a return above 0."),
    FilterOptions(
        _duplicates,
        _option(
            "--dedup",
            "Drop exact duplicates in each group or in the dataset.",
            type=click.Choice(["group", "dataset"]),
        ),
        _option("--dedup-similarity", _SIMILAR, type=NUMBER, metavar="X"),
    ),
    FilterOptions(_overlap, _option("--overlap", _OVERLAP, type=click.Path(), metavar="EVAL")),
    _flag("--drop-overlong", "Drop trajectories that were cut off.", "overlong"),
    _flag("--drop-zero-variance", "Drop groups whose returns are all equal.", "zero_variance"),
    FilterOptions(
        lambda filters, num: [filters.best_of_group(num)],
        _option(
            "--best",
            "Keep the N highest returns of each group; drops unknown returns too.",
            type=click.IntRange(min=1),
            metavar="N",
        ),
    ),
    FilterOptions(
        lambda filters, num, seed: [filters.sample_groups(num, seed)],
        _option("--sample-groups", _SAMPLE, type=WHOLE, metavar="N"),
        _option("--seed", "Seed for drawing groups.", type=int, default=0, show_default=True),
    ),
)
"""Rules that drop trajectories, in the order in which they apply, which is that of `--help`."""

MASKS = (
    _flag("--mask-overlong", "Do not train on trajectories that were cut off.", "overlong"),
    _flag("--mask-failed-groups", "Do not train on groups with a failure.", "failed", "group"),
    _flag("--mask-failed", "Do not train on failed trajectories.", "failed"),
)
"""Rules that mask trajectories."""

_NEEDS = {
    "max_staleness": "policy_version",
    "policy_version": "max_staleness",
    "dedup_similarity": "dedup",
    "move_outcome": "keep_rows",
}
"""Options that mean nothing without another."""


def rule_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of all rules to a command."""
    for rule in reversed(RULES + MASKS):
        for name, settings in reversed(rule.options.items()):
            command = click.option(name, **settings)(command)
    return command


def chosen_filters(values: Options, rules: Sequence[FilterOptions]) -> list[Filter]:
    """Return the filters that options choose, in the order in which they apply; none twice.

    Args:
        values: Values of the options. `overlap` is a pair: the overlaps that were found, and the
            path of the evaluation set; `where` has pairs of a condition and the dataset.
        rules: `RULES` or `MASKS`.
    """
    from pipelines import filters

    chosen: dict[str, Filter] = {}
    for rule in rules:
        of_rule = {option: values[_parameter(option)] for option in rule.options}
        without_default = (v for n, v in of_rule.items() if "default" not in rule.options[n])
        if any(map(is_given, without_default)):
            chosen |= {one.name: one for one in rule.build(filters, *of_rule.values())}
    return list(chosen.values())


def check_usage(out: str | None, values: Options, *, dry_run: bool) -> None:
    """Refuse options that contradict each other, or none at all."""
    if out is None and not dry_run:
        raise click.UsageError("Missing option '--out' (or --dry-run).")
    for name, other in _NEEDS.items():
        if is_given(values[name]) and not is_given(values[other]):
            raise click.UsageError(f"{_spelled(name)} requires {_spelled(other)}.")
    if values["share"] and len(values["share"]) != 1 + len(values["mix"]):
        raise click.UsageError("Pass --share once for DS and once for each --mix, in that order.")
    if not given(values).keys() - {"seed", "outcome", "share"}:
        hint = (
            "select trajectories with --where 'return > 0', --drop-zero-variance, --drop-failed, "
            "--max-tokens N or --sample-groups N, or change the dataset with --mask-overlong or "
            "--mix DS3"
        )
        raise HintedUsageError("no filter is given", hint)


def given(values: Options) -> dict[str, Any]:
    """Return the options that were passed, and the seed."""
    return {name: value for name, value in values.items() if is_given(value)}


def is_given(value: Any) -> bool:
    """True if an option was passed."""
    return value is not None and value is not False and value != ()


def _parameter(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _spelled(parameter: str) -> str:
    return f"--{parameter.replace('_', '-')}"
