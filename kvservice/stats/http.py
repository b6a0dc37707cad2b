"""The HTTP side of a node: /healthz, /metrics (Prometheus), /stats and other answers in JSON. It changes nothing.

Every number comes from one stats document, so that the three views cannot disagree. Answers rest: see answers.py.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from kvservice.model.errors import InvalidInputError, KVServiceError
from kvservice.stats.answers import Resting, RestingAnswers, encoded
from kvservice.stats.explain_request import BODY_BYTES_MAX
from kvservice.stats.metrics import METRICS, MetricSpec

StatsDocument = Mapping[str, object]
Answer = Callable[[Mapping[str, str]], StatsDocument]
"""A JSON answer to a query; raises InvalidInputError."""


class DocumentCollector:
    """Turns the stats document into Prometheus metrics, by the table in ``stats/metrics.py``."""

    def __init__(self, document: Callable[[], StatsDocument]) -> None:
        self._document = document

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client at every scrape."""
        document = self._document()
        for spec in METRICS:
            yield _histogram(spec, document) if spec.is_histogram else _family(spec, spec.samples(document))


def _histogram(spec: MetricSpec, document: StatsDocument) -> Metric:
    family = HistogramMetricFamily(spec.name, spec.help, labels=spec.labels)
    for labels, buckets, total in spec.histograms(document):
        family.add_metric(labels, buckets=[(edge, float(count)) for edge, count in buckets.items()], sum_value=total)
    return family


def _family(spec: MetricSpec, samples: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    kind = CounterMetricFamily if spec.is_counter else GaugeMetricFamily
    family = kind(spec.name, spec.help, labels=spec.labels)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def build_http(document: Callable[[], StatsDocument], answers: Mapping[str, Answer]) -> web.Application:
    """The aiohttp application of a node that serves. ``document`` runs on the catalog's thread, which is aiohttp's.

    ``answers``: what else is answered, by path, on that thread too.
    """
    registry = CollectorRegistry()
    registry.register(DocumentCollector(document))
    text, numbers = Resting(lambda: generate_latest(registry)), Resting(lambda: encoded(document()))

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=text.get(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def stats(_: web.Request) -> web.Response:
        return _json(numbers.get())

    application = web.Application(client_max_size=BODY_BYTES_MAX)
    application.router.add_get("/healthz", healthz)
    application.router.add_get("/metrics", metrics)
    application.router.add_get("/stats", stats)
    for path, answer in answers.items():
        application.router.add_get(path, partial(_answer, RestingAnswers(answer)))
    return application


async def _answer(answers: RestingAnswers, request: web.Request) -> web.Response:
    if len(request.query) != len(set(request.query)):
        return refusal(InvalidInputError("every parameter may be given once"))
    try:
        return _json(answers.get(request.query))
    except InvalidInputError as error:
        return refusal(error)


def _json(content: bytes) -> web.Response:
    return web.Response(body=content, content_type="application/json", charset="utf-8")


def refusal(error: KVServiceError, status: int = 400) -> web.Response:
    """An error as JSON."""
    return web.json_response({"error": error.code, "message": str(error)}, status=status)
