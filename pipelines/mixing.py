"""Mix datasets: draw complete groups from each in given proportions, and interleave them evenly."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from itertools import combinations

import numpy as np
import polars as pl

from pipelines.filters import lot
from pipelines.frames import Frame, as_lazy, exact_column
from pipelines.rewards import place_token_rewards
from schemas.columns import TASK
from schemas.errors import ConfigError, InputError, InvariantError, count, first_of

_POSITION = "position in the mixture"
_COUNTS = ("dataset", "num_groups_before", "num_groups", "num_trajectories")


def mix(
    frames: Mapping[str, Frame],
    *,
    shares: Mapping[str, float] | None = None,
    num_groups: int | None = None,
    seed: int = 0,
    prefix_names: bool = False,
) -> tuple[pl.LazyFrame, pl.DataFrame]:
    """Mix complete groups of several datasets.

    The drawn groups depend only on the seed and the group ids (see `sample_groups`). Each
    dataset keeps its order, and its trajectories are spread evenly: trajectory i of the n drawn
    from it gets position (i + 1/2) / n. Ties go to the earlier dataset. A column that a dataset
    lacks is null in its rows.

    A group is one task of one dataset, so an instance_id that occurs in two datasets is rejected.
    With `prefix_names`, "NAME/" is prepended to every id of a group, trajectory or task instead.

    Args:
        frames: Rows of each dataset (complete trajectories), by dataset name.
        shares: Relative number of groups to draw from each dataset, above 0; None: proportional to
            the number of groups in each dataset.
        num_groups: Total number of groups; None: as many as `shares` allows, or all without it.
        seed: Seed for drawing the groups.
        prefix_names: Prefix ids with the dataset name to keep groups apart.

    Returns:
        The mixed rows; and a report with one line per dataset: dataset, num_groups_before,
        num_groups, num_trajectories.

    Raises:
        InputError: `unique_group`: a group is in two datasets; `enough_groups`: a dataset has too
            few groups; `nothing_left`: no group would be drawn.
        InvariantError: `columns_and_types`: a column has different types in two datasets.
        ConfigError: `shares`: there is not exactly one number above 0 per dataset.

    Example:
        Groups m1, m2 of "math" and c1 of "code", one trajectory each:

        >>> rows, counts = mix({"math": math, "code": code})
        >>> rows.select("instance_id").collect().to_series().to_list()
        ['m1', 'c1', 'm2']
    """
    assert frames
    lazy = {name: _with_reward(as_lazy(frame)) for name, frame in frames.items()}
    ids = {name: _ids(frame) for name, frame in lazy.items()}
    if not prefix_names:
        _refuse_shared(ids)
    sizes = {name: data["instance_id"].n_unique() for name, data in ids.items()}
    quotas = group_quotas(sizes, shares, num_groups)
    drawn = {name: _draw(data, quotas[name], seed) for name, data in ids.items()}
    mixed = _interleaved(lazy, drawn, prefix_names=prefix_names)
    counts = [(name, sizes[name], quotas[name], len(data)) for name, data in drawn.items()]
    return mixed, pl.DataFrame(counts, schema=_COUNTS, orient="row")


def group_quotas(
    sizes: Mapping[str, int], shares: Mapping[str, float] | None, num_groups: int | None
) -> dict[str, int]:
    """Split the total number of groups in proportion to `shares`, by the largest-remainder method.

    Raises:
        InputError: `enough_groups`: a dataset has fewer groups than its share requires;
            `nothing_left`: the total is 0.
        ConfigError: `shares`: there is not exactly one number above 0 per dataset.

    Example:
        >>> group_quotas({"math": 60, "code": 100}, {"math": 0.75, "code": 0.25}, None)
        {'math': 60, 'code': 20}
    """
    if shares is None and num_groups is None:
        return dict(sizes)
    wanted = {name: float(size) for name, size in sizes.items()} if shares is None else shares
    _check_shares(sizes, wanted)
    total = num_groups
    if total is None:
        # 1e-9 absorbs rounding errors: a quotient of 99.9999999999 means 100 groups.
        total = int(min(sizes[name] / share for name, share in _unit(wanted).items()) + 1e-9)
    exact = {name: share * total for name, share in _unit(wanted).items()}
    quotas = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: quotas[name] - exact[name])
    for name in by_remainder[: total - sum(quotas.values())]:
        quotas[name] += 1
    for name, quota in quotas.items():
        if quota > sizes[name]:
            hint = "ask for fewer groups, or for a smaller fraction from this dataset"
            finding = count(sizes[name], "group")
            raise InputError("enough_groups", name, finding, f"at least {quota}", hint)
    if total == 0:
        hint = "loosen the filters, or ask for more groups"
        raise InputError("nothing_left", "mixture", "no group is left", hint=hint)
    return {name: quotas[name] for name in sizes}


def _check_shares(sizes: Mapping[str, int], shares: Mapping[str, float]) -> None:
    good = all(np.isfinite(share) and share > 0 for share in shares.values())
    if set(shares) != set(sizes) or not good:
        finding = ", ".join(f"{name}: {share}" for name, share in shares.items())
        expected = "one number above 0 for each of " + ", ".join(sizes)
        raise ConfigError("shares", "mixture", finding, expected, "leave out empty datasets")


def _unit(shares: Mapping[str, float]) -> dict[str, float]:
    return {name: share / sum(shares.values()) for name, share in shares.items()}


def _with_reward(frame: pl.LazyFrame) -> pl.LazyFrame:
    """Add `reward` to a dataset that has only `rewards`.

    Otherwise, mixing it with a dataset that has `reward` would fill the column with nulls, which
    contradict `rewards`.
    """
    names = frame.collect_schema()
    alone = "rewards" in names and "reward" not in names
    return place_token_rewards(frame) if alone else frame


def _ids(frame: pl.LazyFrame) -> pl.DataFrame:
    ids = frame.select("instance_id", "trajectory_id")
    return ids.unique(maintain_order=True).collect(engine="streaming")


def _refuse_shared(ids: Mapping[str, pl.DataFrame]) -> None:
    for one, other in combinations(ids, 2):
        shared = ids[one].join(ids[other], on="instance_id", how="semi", maintain_order="left")
        if len(shared):
            number = shared["instance_id"].n_unique()
            finding = first_of(f"both contain group {shared['instance_id'][0]!r}", number)
            hint = "prefix ids with the dataset's name: --prefix-names (prefix_names=True)"
            raise InputError("unique_group", f"{one} and {other}", finding, hint=hint)


def _draw(ids: pl.DataFrame, num_groups: int, seed: int) -> pl.DataFrame:
    groups = sorted(ids["instance_id"].unique().to_list(), key=lambda group: lot(group, seed))
    return ids.filter(pl.col("instance_id").is_in(groups[:num_groups]))


def _interleaved(
    frames: Mapping[str, pl.LazyFrame], drawn: Mapping[str, pl.DataFrame], *, prefix_names: bool
) -> pl.LazyFrame:
    schema, position = _common_schema(frames), _POSITION
    while position in schema:  # a user column may have any name
        position += "'"
    parts = [
        _place(
            frames[name],
            places.rename({_POSITION: position}),
            schema,
            f"{name}/" if prefix_names else "",
        )
        for name, places in _positions(drawn).items()
    ]
    return reduce(lambda a, b: a.merge_sorted(b, key=position), parts).drop(position)


def _positions(drawn: Mapping[str, pl.DataFrame]) -> dict[str, pl.DataFrame]:
    """For each dataset, list the drawn trajectory ids with their positions in the mixture."""
    places = [
        data.select(
            "trajectory_id",
            dataset=pl.lit(number, pl.Int32),
            place=(pl.int_range(pl.len()) + 0.5) / pl.len(),
        )
        for number, data in enumerate(drawn.values())
    ]
    order = pl.concat(places).sort("place", "dataset", maintain_order=True)
    order = order.with_row_index(_POSITION)
    return {
        name: order.filter(pl.col("dataset") == number).select("trajectory_id", _POSITION)
        for number, name in enumerate(drawn)
    }


def _common_schema(frames: Mapping[str, pl.LazyFrame]) -> pl.Schema:
    empty = [pl.DataFrame(schema=frame.collect_schema()) for frame in frames.values()]
    kinds: dict[str, pl.DataType] = {}
    for name, data in zip(frames, empty, strict=True):
        for column, kind in data.schema.items():
            first_kind = kinds.setdefault(column, kind)
            # Nested types may have a supertype (structs with more fields): let concat decide.
            if first_kind != kind and not (first_kind.is_nested() and kind.is_nested()):
                where = f"{name}, column {column!r}"
                raise InvariantError("columns_and_types", where, f"type {kind}", f"{first_kind}")
    try:
        return pl.concat(empty, how="diagonal_relaxed").schema
    except pl.exceptions.PolarsError as error:
        where = ", ".join(frames)
        finding = f"cannot combine the columns: {str(error).splitlines()[0]}"
        raise InvariantError("columns_and_types", where, finding) from None


def _place(
    frame: pl.LazyFrame, places: pl.DataFrame, schema: pl.Schema, prefix: str
) -> pl.LazyFrame:
    """Select the drawn rows of one dataset, with positions, cast to the common schema."""
    present = frame.collect_schema()
    columns = [
        (exact_column(name) if name in present else pl.lit(None)).cast(kind).alias(name)
        for name, kind in schema.items()
    ]
    drawn = frame.select(columns).join(
        places.lazy(), on="trajectory_id", how="inner", maintain_order="left"
    )
    if not prefix:
        return drawn
    ids = [name for name in ("instance_id", "trajectory_id", TASK) if name in schema]
    return drawn.with_columns(pl.concat_str(pl.lit(prefix), name).alias(name) for name in ids)
