"""The HTTP side of a node: /healthz, /metrics (Prometheus), /stats, /plan and /curves (JSON). It changes nothing.

Every number comes from one stats document, so that the three views cannot disagree.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvservice.model.errors import InvalidInputError
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
            yield _family(spec, spec.samples(document))


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

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def stats(_: web.Request) -> web.Response:
        return web.json_response(dict(document()))

    application = web.Application()
    application.router.add_get("/healthz", healthz)
    application.router.add_get("/metrics", metrics)
    application.router.add_get("/stats", stats)
    for path, answer in answers.items():
        application.router.add_get(path, partial(_answer, answer))
    return application


async def _answer(answer: Answer, request: web.Request) -> web.Response:
    if len(request.query) != len(set(request.query)):
        return _refusal(InvalidInputError("every parameter may be given once"))
    try:
        return web.json_response(dict(answer(request.query)))
    except InvalidInputError as error:
        return _refusal(error)


def _refusal(error: InvalidInputError) -> web.Response:
    return web.json_response({"error": error.code, "message": str(error)}, status=400)
