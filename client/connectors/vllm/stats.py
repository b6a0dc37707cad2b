"""Figures as vLLM wants them: for its log line, and for its /metrics. Imports vLLM."""

from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvservice.client.connectors.vllm.metrics import COUNTERS, GAUGES, merged

PREFIX = "vllm:kvservice_"


class KVServiceStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """Counters since the last report, and gauges. vLLM carries ``data`` from the workers to the log and to metrics."""

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Figures of two ranks, sides or intervals as one."""
        return KVServiceStats(data=merged(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """For the log: what is not zero."""
        return {name: round(value, 3) for name, value in self.data.items() if value}

    def is_empty(self) -> bool:
        """True if there is nothing to report."""
        return not self.data


class KVServiceProm(KVConnectorPromMetrics):  # type: ignore[misc]
    """One counter or gauge a figure, by engine; all are there, at 0, before anything happened."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        kinds = [(metric_types[Counter], COUNTERS), (metric_types[Gauge], GAUGES)]
        self._metrics: dict[str, dict[int, Any]] = {}
        for kind, names in kinds:
            for name, text in names.items():
                metric = kind(name=PREFIX + name, documentation=text, labelnames=labelnames)
                self._metrics[name] = {
                    engine: metric.labels(*values) for engine, values in per_engine_labelvalues.items()
                }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take in one report."""
        for name, value in transfer_stats_data.items():
            metric = self._metrics.get(name, {}).get(engine_idx)
            if metric is None:
                continue
            if name in GAUGES:
                metric.set(value)
            else:
                metric.inc(value)
