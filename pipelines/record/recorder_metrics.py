"""Metrics of a recorder, for Prometheus and the status line."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """Counters, gauges and histograms of one recorder."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.calls = self._counter("calls", "Calls that were recorded.")
        self.tokens = self._counter("tokens", "Tokens sampled in recorded calls.")
        self.drifts = self._counter("drifts", "Calls that did not continue the previous call.")
        self.cut_off = self._counter("cut_off", "Calls whose stream was cut off.")
        self.unrecorded = self._counter("unrecorded", "Calls that were served but not recorded.")
        self.refused = self._counter("refused", "Requests rejected with 4xx or 5xx.")
        self.retries = self._counter("retries", "Retries of calls to an engine.")
        self.written = self._counter("trajectories", "Trajectories written to shards.")
        self.exact_prefix = Counter(
            "rollouts_record_exact_prefix",
            "Chat calls by how they were sent.",
            ["sent"],
            registry=self.registry,
        )
        self.open = self._gauge("open_sessions", "Sessions that have not ended.")
        self.waiting = self._gauge("ended_sessions", "Ended sessions that are not in a shard yet.")
        self.under_way = self._gauge("calls_under_way", "Calls in progress.")
        self.first_token = Histogram(
            "rollouts_record_first_byte_seconds",
            "Time from a request to the first byte of its response.",
            buckets=_BUCKETS,
            registry=self.registry,
        )

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"rollouts_record_{name}", text, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"rollouts_record_{name}", text, registry=self.registry)

    def text(self) -> bytes:
        """Export all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


def number(metric: Counter | Gauge) -> float:
    """Read the value of a counter or gauge."""
    return float(next(iter(next(iter(metric.collect())).samples)).value)
