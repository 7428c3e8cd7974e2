"""What a process that stays answers over HTTP: its health, and its metrics in Prometheus's text format."""

from __future__ import annotations

import json
import logging
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from types import TracebackType
from typing import Any, NamedTuple

from airflow_delayed.threads import start_thread

log = logging.getLogger(__name__)

#: Upper bounds of the buckets of a duration, in seconds: from in time to an hour late.
BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)
#: Seconds without a byte of its request, after which a client's connection is closed.
REQUEST_SECONDS = 5.0
#: Connections that are open at a time, each with a thread.
MAX_CONNECTIONS = 16


class Answer(NamedTuple):
    """The answer to a request."""

    status: int
    content_type: str
    content: bytes


def health(healthy: bool, details: Mapping[str, object]) -> Answer:
    """Return the answer of a probe, in JSON: 200, or 503 if it is not healthy."""
    return Answer(200 if healthy else 503, "application/json", json.dumps(details).encode() + b"\n")


class ProbeServer:
    """Answers GET within a ``with`` block, in threads that keep no process from ending.

    :param host: a name, or an address of IPv4 or IPv6, such as ``::1``.
    :param port: 0 takes any free port.
    :param answers: by path; called for each request, from any thread.
    :raises OSError: the port is in use, or may not be used.
    """

    def __init__(self, host: str, port: int, answers: Mapping[str, Callable[[], Answer]]) -> None:
        class Handler(_Handler):
            paths = answers

        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]

        class Server(_Server):
            address_family = family

        self._server = Server((str(address[0]), port), Handler)
        self.port: int = self._server.server_address[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def __enter__(self) -> ProbeServer:
        start_thread(self._server.serve_forever, "delayed-probes")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """Answers each connection in a thread of its own, and drops the oldest connection for one more than may be open.

    So a client that sends its request a byte at a time, or never, costs no more than that, and keeps no probe waiting.
    """

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: dict[int, socket.socket] = {}
        self._lock = Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[id(request)] = request
            if len(self._open) > MAX_CONNECTIONS:
                oldest = self._open.pop(next(iter(self._open)))
                with suppress(OSError):
                    # its thread reads the end of the request, and closes it
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(id(request), None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("A client of the probes ended its connection: %s", getattr(sys.exc_info()[0], "__name__", ""))


class _Handler(BaseHTTPRequestHandler):
    paths: Mapping[str, Callable[[], Answer]] = {}
    timeout = REQUEST_SECONDS
    #: Neither Python's version nor ours.
    server_version, sys_version = "airflow-delayed", ""

    def do_GET(self) -> None:
        answer = self.paths.get(self.path.partition("?")[0])
        status, content_type, content = answer() if answer else Answer(404, "text/plain", b"not found\n")
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


class PrometheusRecorder:
    """Keeps metrics as Prometheus counts them: ``delayed.dispatched`` is ``delayed_dispatched_total`` there.

    A duration, ``delayed.lateness``, is a histogram of seconds, ``delayed_lateness_seconds``.

    :raises ImportError: prometheus_client is not installed.
    """

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, disable_created_metrics

        # when a counter began is a series of its own in this format, as many again
        disable_created_metrics()
        self._registry = CollectorRegistry()
        self._metrics: dict[str, Any] = {}
        self._lock = Lock()

    def incr(self, name: str, count: int, *, tags: dict[str, str]) -> None:
        """Add to a counter; 0 makes it known."""
        from prometheus_client import Counter

        self._metric(Counter, name, tags).inc(count)

    def gauge(self, name: str, value: float, *, tags: dict[str, str]) -> None:
        """Set a gauge."""
        from prometheus_client import Gauge

        self._metric(Gauge, name, tags).set(value)

    def timing(self, name: str, dt: timedelta, *, tags: dict[str, str]) -> None:
        """Note one duration."""
        from prometheus_client import Histogram

        self._metric(Histogram, f"{name}_seconds", tags, buckets=BUCKETS).observe(dt.total_seconds())

    def answer(self) -> Answer:
        """Return all metrics in the text format."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return Answer(200, CONTENT_TYPE_LATEST, generate_latest(self._registry))

    def _metric(self, kind: Callable[..., Any], name: str, tags: dict[str, str], **options: Any) -> Any:
        name = name.replace(".", "_")
        with self._lock:
            if name not in self._metrics:
                self._metrics[name] = kind(
                    name, "See docs/airflow/metrics.md", list(tags), registry=self._registry, **options
                )
            return self._metrics[name].labels(**tags)
