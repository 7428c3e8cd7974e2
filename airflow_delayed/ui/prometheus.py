"""The page's figures as metrics for Prometheus, read with a token of their own.

The API server answers also where no dispatcher works, so that an alert needs no dispatcher to fire.

=========================================== ========================================================================
metric                                      value
=========================================== ========================================================================
``delayed_page_up``                         1: the connection answered; 0: it did not
``delayed_page_findings``                   1 for each finding of the verdict, by ``code`` and ``severity``
``delayed_page_messages``                   messages of a store by ``state``: due, overdue, failed, ...
``delayed_page_oldest_due_seconds``         how long the oldest message of a store has been due; 0: none is due
``delayed_page_forecast_late_seconds``      how late the latest message will be that falls due within a day; 0: none
                                            is more than a minute late, or the dispatchers' speed is not known yet
=========================================== ========================================================================

Each has the labels ``store_conn_id`` or ``conn_id``, ``kind`` and, of SQS, ``queue``: the other ones are empty.
"""

from __future__ import annotations

from hmac import compare_digest
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from airflow_delayed import config
from airflow_delayed.ui import api_brokers, api_stores, security, verdict
from airflow_delayed.ui.api_live import Figures
from airflow_delayed.ui.hook_pool import HookPool
from airflow_delayed.ui.models import StoreSummary
from airflow_delayed.ui.security import PageConnection

_STATES = ("waiting", "due", "overdue", "in_flight", "retrying", "failed", "expired")
_LABELS = ("store_conn_id", "conn_id", "kind", "queue")


async def answer(request: Request) -> Response:
    """Return the metrics; 404 without ``[delayed] metrics_token``, 401 with another token than that."""
    token = config.metrics_token()
    if not token:
        return _refused(HTTPStatus.NOT_FOUND, "set [delayed] metrics_token in Airflow's configuration to have metrics")
    if not compare_digest(request.headers.get("authorization", "").encode(), f"Bearer {token}".encode()):
        return _refused(HTTPStatus.UNAUTHORIZED, "send Authorization: Bearer with the token of [delayed] metrics_token")
    try:
        import prometheus_client  # noqa: F401 - an extra of the package
    except ImportError:
        return _refused(HTTPStatus.NOT_IMPLEMENTED, "install airflow-provider-delayed[prometheus] for /metrics")
    pool: HookPool = request.app.state.hook_pool
    connections = security.configured()
    answers = await verdict.ask(
        connections,
        lambda name: api_stores.figures(name, pool),
        lambda name: api_brokers.rabbitmq_figures(name, pool),
        pool,
    )
    content, kind = _text(list(zip(connections, answers, strict=True)))
    return Response(content, media_type=kind)


def _refused(status: HTTPStatus, text: str) -> Response:
    return PlainTextResponse(f"{text}\n", status)


def _text(answers: list[tuple[PageConnection, Figures | Exception]]) -> tuple[bytes, str]:
    """Return the metrics in Prometheus' text format, and its media type."""
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest

    registry = CollectorRegistry()

    def gauge(name: str, help_: str, *labels: str) -> Gauge:
        return Gauge(f"delayed_page_{name}", help_, (*_LABELS, *labels), registry=registry)

    up = gauge("up", "Whether the connection answered")
    findings = gauge("findings", "Findings of the verdict", "code", "severity")
    messages = gauge("messages", "Messages of a store", "state")
    oldest = gauge("oldest_due_seconds", "How long the oldest message of a store has been due")
    forecast = gauge("forecast_late_seconds", "How late the latest message will be that falls due within a day")
    for connection, summary in answers:
        name, kind = connection.connection_id, connection.kind
        labels = (name if kind == "store" else "", "" if kind == "store" else name, kind, connection.queue or "")
        up.labels(*labels).set(0 if isinstance(summary, Exception) else 1)
        if isinstance(summary, Exception):
            continue
        for finding in verdict.findings_of(summary):
            findings.labels(*labels, finding.code, finding.severity).set(1)
        if isinstance(summary, StoreSummary):
            for state in _STATES:
                messages.labels(*labels, state).set(getattr(summary, state))
            late = 0.0 if summary.oldest_due is None else (summary.at - summary.oldest_due).total_seconds()
            oldest.labels(*labels).set(late)
            forecast.labels(*labels).set(summary.forecast_late_seconds)
    return generate_latest(registry), CONTENT_TYPE_LATEST
