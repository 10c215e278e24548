"""Keep exact log-probabilities in the logs of verifiers and prime-rl: `examples/hooks/verifiers_eval.py`."""

from __future__ import annotations

from schemas.errors import ConfigError


def keep_digits() -> None:
    """Save the log-probabilities of `traces.jsonl` as sampled (verifiers 0.4 rounds to 4 decimals).

    Rounding shifts each log-probability by up to 5e-5 nats. Call it in the process that saves the
    traces, before the run; then `rollouts convert` reads the exact rows.

    Raises:
        ConfigError: `hook_version`: this version of verifiers rounds elsewhere.
    """
    from verifiers.v1 import episode, graph, trace

    records = episode.Episode.to_record, trace.Trace.to_record
    decimals = getattr(graph, "RECORD_FLOAT_DECIMALS", None)
    if decimals is None or any(record.__defaults__ != (decimals,) for record in records):
        finding = "its verifiers.v1.graph has no RECORD_FLOAT_DECIMALS for records"
        raise ConfigError("hook_version", "verifiers", finding, "verifiers 0.4")
    graph.RECORD_FLOAT_DECIMALS = None
    for record in records:
        record.__defaults__ = (None,)
