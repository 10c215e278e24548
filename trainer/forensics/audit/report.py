"""The faults that an audit found, in words, and its summary, as JSON or as text for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import polars as pl
from rich.console import Group, RenderableType
from rich.text import Text

from rollout_io.cli.output import bare_table, drawn, section
from rollout_io.terminal import duration, printable
from schemas.errors import count
from schemas.records import MEANINGS, NO_FAULT
from trainer.forensics.audit.hypotheses import DECIDED
from trainer.forensics.audit.rows import OFF
from trainer.forensics.audit.weights import Candidate

if TYPE_CHECKING:
    from trainer.forensics.audit.audit import AuditResult


ASSUMED_RAW = " (assumed: no row reveals the kind)"
TOO_CLOSE = 0.25
"""Candidates are reported as indistinguishable if their distance is less than this multiple of the
engine's noise."""


def summary(result: AuditResult, limit: int) -> dict[str, Any]:
    """Return the summary of an audit for JSON, with the `limit` worst spans."""
    weights, counts = result.weights, _counts(result.verdicts)
    candidates = weights.candidates
    return {
        "num_rows": result.num_rows,
        "num_spans": len(result.verdicts),
        "num_faulty_spans": len(result.faults),
        "num_faulty_rows": result.faults.select("trajectory_id", "step_index").n_unique(),
        "verdicts": {row.pop("kind"): row for row in counts.iter_rows(named=True)},
        "causes": likely_causes(result),
        "candidates": [{"version": one.version, "weights": str(one.path)} for one in candidates],
        "differences": [
            {"first": candidates[a].name, "second": candidates[b].name, "mean": value}
            for (a, b), value in sorted(result.apart.items())
        ],
        "logprobs_mode": result.mode,
        "logprobs_mode_is_inferred": result.mode_is_inferred,
        "num_logprobs_mode_tokens": result.num_mode_tokens,
        "noise": {
            name: getattr(result.noise, name) for name in ("mean_difference", "kappa", "num_tokens")
        },
        "cost": {
            "num_distinct_tokens": result.num_distinct,
            "num_forwarded_tokens": weights.num_tokens,
            "share": result.share,
            "seconds": weights.seconds,
            "num_suspicious_rows": result.num_suspicious,
        },
        "worst": result.worst(limit).to_dicts(),
    }


def _counts(verdicts: pl.DataFrame) -> pl.DataFrame:
    """Count spans, rows and tokens by kind, in the order of `MEANINGS`."""
    counts = verdicts.group_by("kind").agg(
        spans=pl.len(),
        rows=pl.struct("trajectory_id", "step_index").n_unique(),
        tokens=pl.col("num_tokens").sum(),
    )
    return pl.DataFrame({"kind": list(MEANINGS)}).join(counts, on="kind", maintain_order="left")


def screen(path: str, result: AuditResult, limit: int) -> str:
    """Format the summary of an audit for the terminal."""
    verdicts = bare_table("verdict", "spans", "rows", "tokens", "", left={"verdict", ""})
    for kind, *numbers in _counts(result.verdicts).iter_rows():
        style = "" if kind in NO_FAULT else "red"
        verdicts.add_row(kind, *map("{:,}".format, numbers), MEANINGS[kind], style=style)
    parts: list[RenderableType] = [
        Text(f"{path}: {count(result.num_rows, 'row')} audited"),
        *(Text(f"{name:<20}{text}") for name, text in _facts(result)),
        *section("Verdicts", verdicts),
    ]
    if causes := likely_causes(result):
        parts += section("Likely causes", Group(*(Text(printable(text)) for text in causes)))
    if limit and len(result.faults):
        titles = "row", "tokens", "fault", "nats", "found"
        faults = bare_table(*titles, left={"row", "fault", "found"}, folds={"found"})
        for one in result.worst(limit).iter_rows(named=True):
            where = printable(f"{one['trajectory_id']} step {one['step_index']}")
            nats, reason = f"{one['log_likelihood_ratio']:,.0f}", printable(one["reason"])
            faults.add_row(where, f"{one['num_tokens']:,}", one["kind"], nats, reason)
        parts += section("Most certain faults", faults)
    return drawn(parts)


def _facts(result: AuditResult) -> Iterator[tuple[str, str]]:
    noise, weights, apart = result.noise, result.weights, result.apart
    tokens = count(result.num_mode_tokens, "token")
    inferred = f" (inferred from {tokens})" if result.num_mode_tokens else ASSUMED_RAW
    yield "log-probabilities", result.mode + inferred * result.mode_is_inferred
    text = f"{noise.mean_difference:.2g} nats on average, from {noise.num_tokens:,} tokens"
    assumed = "assumed to be typical of bfloat16, because no candidate fits the rows"
    yield "engine's noise", text if noise.num_tokens else assumed
    if apart:
        least, most = min(apart.values()), max(apart.values())
        between = f"{least:.2g}" if len(apart) == 1 else f"{least:.2g} to {most:.2g}"
        yield "candidates", f"{len(weights.candidates)}, {between} nats apart"
    for (a, b), distance in apart.items():
        if distance < TOO_CLOSE * noise.mean_difference:
            names = f"{weights.candidates[a].name} and {weights.candidates[b].name}"
            yield "indistinguishable", f"{names}: a row that fits one also fits the other"
    tokens = f"{weights.num_tokens:,} tokens in {duration(weights.seconds)}"
    yield "forwarded", f"{tokens} ({result.share:.0%} of candidates x distinct tokens)"


MOST = 0.95
"""If at least this fraction of rows has a fault, the fault is reported as affecting all rows."""
SEVERAL = 3
"""Minimum number of faulty rows to suggest that one of several servers is at fault."""
SENTENCES = {
    "swap": "In {spans}, weights changed from version {best_version} to {second_version} during the"
    " response: the engine loaded weights without waiting for running calls (weight_sync ="
    ' "wait" avoids this).',
    "temperature": "{spans} labelled with temperature {labelled_temperature:.3g} fit temperature"
    " {best_temperature:.2f} (the median): the engine used a default, or another request's setting.",
    "unrecorded": "{spans} do not record how they were sampled, and fit the model's"
    " generation_config.json (temperature {best_temperature:.2g}): write its temperature, top_p and"
    " top_k to the rows.",
    "truncation": "{spans} fit a different truncation than labelled, most often {setting}: the"
    " engine added a default, such as one from the model's generation_config.json.",
    "raw_logprobs": "{spans} have raw log-probabilities instead of processed ones: a server runs"
    " with --logprobs-mode raw_logprobs.",
    "processed_logprobs": "{spans} have processed log-probabilities instead of raw ones: a server"
    " runs with --logprobs-mode processed_logprobs.",
    "offset": "In {spans}, each log-probability belongs to {token}: the list is shifted against"
    " response_ids, by a token that was dropped or added.",
    "noise": "{spans} fit their weights with {noise_scale:.1f} times the noise of the other spans"
    " (the median): a server runs in a lower precision, such as 8 bits or fewer.",
    "prompt": "{spans} fit a prompt that was rendered differently ({reason}): the engine did not"
    " receive the stored prompt.",
    "unknown_model": "{spans} fit none of the candidates: they were sampled by another model or in"
    " another precision, or the engine received a different prompt.",
}
"""Sentences about the faults of a kind; fields are the median, or else the most frequent value."""
DESCRIPTIONS = {
    "version": "sampled by {name}, labelled {labelled_version}",
    "swap": "version {best_version}, from token {swap_position} version {second_version}, labelled"
    " {labelled_version}",
    "temperature": "temperature {best_temperature:.2f}, {label}",
    "truncation": "{setting}",
    "offset": "shifted by {offset:+d}",
    "prompt": "{reason}",
    "unknown_model": "{mean_difference:.2g} nats from version {best_version}",
    "noise": "{mean_difference:.2g} nats from version {best_version}{cause}, {noise_scale:.1f} x the"
    " noise",
}
"""Descriptions of a span's fault; those of other kinds are like that of `noise`."""
SPLIT_BY = {
    "swap": ("best_version", "second_version"),
    "temperature": ("labelled_temperature",),
    "offset": ("offset",),
}
"""Columns whose values get a sentence each."""


def likely_causes(result: AuditResult) -> list[str]:
    """Return a sentence for each likely cause of faults; causes that affect most rows come first."""
    checked = result.verdicts.filter(pl.col("kind") != "not_checked")
    causes = list(_versions(checked, result.weights.candidates))
    for kind in SENTENCES:
        faults = checked.filter(kind=kind)
        parts = faults.partition_by(SPLIT_BY.get(kind, "kind"), maintain_order=True)
        causes += [(len(part), _sentence(kind, part)) for part in parts]
    return [text for _, text in sorted(causes, key=lambda cause: -cause[0])]


def _fields(span: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a verdict, and words for its sentences."""
    cut = {name: span[f"best_{name}"] for name in OFF._fields}
    setting = [f"{n} {round(v, 2)}" for n, v in cut.items() if v != getattr(OFF, n)]
    by, label, best = span["offset"], span["labelled_temperature"], span["best_version"]
    side, place = ("next", "later") if by > 0 else ("previous", "earlier")
    name = span["best_weights"] if best is None else f"version {best}"
    if span["next_version"] not in {None, span["labelled_version"]} and span["margin"] < DECIDED:
        name += f" or {span['next_version']}, which fit equally well"
    return {
        **span,
        "setting": ", ".join(setting) or "no truncation",
        "token": f"the {side} token" if abs(by) == 1 else f"the token {abs(by)} positions {place}",
        "label": "not recorded" if label is None else f"labelled {label:.2f}",
        "name": name,
        "cause": f" with {span['reason']}" if span["reason"] else "",
    }


def describe(span: Mapping[str, Any]) -> str | None:
    """Describe the fault of a span in a few words; without a fault, return its `reason`."""
    if span["kind"] in NO_FAULT:
        reason: str | None = span["reason"]
        return reason
    return DESCRIPTIONS.get(span["kind"], DESCRIPTIONS["noise"]).format_map(_fields(span))


def _sentence(kind: str, part: pl.DataFrame) -> str:
    fields = pl.DataFrame([_fields(span) for span in part.iter_rows(named=True)])
    medians = part.select(pl.col("best_temperature", "noise_scale").median())
    frequent = fields.select(pl.col("reason", "setting").mode().min())
    values = fields.row(0, named=True) | medians.row(0, named=True) | frequent.row(0, named=True)
    if kind == "temperature" and values["labelled_temperature"] is None:
        kind = "unrecorded"
    return SENTENCES[kind].format_map(values | {"spans": count(len(part), "span")})


def _versions(checked: pl.DataFrame, candidates: Sequence[Candidate]) -> Iterator[tuple[int, str]]:
    """Explain rows that were not sampled by the weights in their label."""
    totals = dict(checked.group_by("labelled_version").len().iter_rows())
    keys = ["labelled_version", "best_version", "best_weights"]
    pairs = checked.filter(kind="version").group_by(keys).len().sort(keys, nulls_last=True)
    names = {str(one.path): one.name for one in candidates}
    for labelled, _, path, number in pairs.filter(pl.col("best_version").is_null()).iter_rows():
        rows = _spans(number, totals[labelled])
        yield number, f"{rows} labelled {labelled} were sampled by {names[path]}."
    versions = pairs.drop_nulls(keys[:2])
    shifts = (versions["labelled_version"] - versions["best_version"]).unique()
    are_whole = all(number >= MOST * totals[label] for label, *_, number in versions.iter_rows())
    if len(shifts) == 1 and are_whole and len(versions) > 1:
        shift, number = shifts.item(), int(versions["len"].sum())
        side = "above" if shift > 0 else "below"
        text = f"Labels are {abs(shift)} {side} the version that sampled the row, in all"
        text += f" {count(number, 'row')} of {count(len(versions), 'label')}: labels are read at"
        yield number, f"{text} the wrong time, or start at a different number."
        return
    for part in versions.partition_by("best_version", maintain_order=True):
        labels, best = part["labelled_version"], part["best_version"][0]
        first, last, number = labels[0], labels[-1], int(part["len"].sum())
        total = sum(totals[label] for label in labels)
        if last < best:
            cause = "new weights were loaded before the label changed"
        elif number >= MOST * total:
            cause = "new weights were not loaded into the engine"
        else:
            servers = "one of several servers" if number >= SEVERAL else "a server"
            cause = f"{servers} is stale, or these calls began before the weights were loaded"
        rows = f"labelled {first}{f' to {last}' if last > first else ''}"
        text = f"{_spans(number, total)} {rows} were sampled by version {best}: {cause}."
        yield number, text


def _spans(number: int, total: int) -> str:
    return f"All {count(number, 'span')}" if number >= total else f"{number:,} of {total:,} spans"
