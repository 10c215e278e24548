"""Compare logs in the viewer with their conversion."""

import polars as pl

COMPARED = ("messages", "agent", "error", "reward", "stop_reason", "token_source")


def log_of(ask):
    """What the page is told about logs."""
    return ask("/api/sources")["datasets"][0]["log"]


def different_texts(ask, converted):
    """Return (trajectory, column) where the rows of the viewer are not those of a dataset."""
    logs, found = ask.sources.dataset("d0"), []
    names = [*logs.present(*COMPARED), "step_index"]
    for (name,), rows in converted.sort("step_index").group_by(
        "trajectory_id", maintain_order=True
    ):
        own = pl.from_arrow(logs.trajectory(logs.index.number(name), names))
        for column in names:
            theirs = rows[column] if column in rows.columns else pl.Series([None] * len(rows))
            if own[column].to_list() != theirs.to_list():
                found.append((name, column))
    return found
