"""Stands in for Prometheus's statsd_exporter, by docs/operations/monitoring/statsd-mapping.yml: it has no package.

It knows what this mapping needs: globs, counters, gauges, and timings as histograms; a gauge's ``ttl`` is ignored. The
real program (0.22.8) gave the same answer for the same datagrams when the mapping was written.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import yaml

from airflow_delayed.cli.service import Answer, ProbeServer


class Exporter:
    """The metrics so far."""

    def __init__(self, mapping: Path) -> None:
        from prometheus_client import CollectorRegistry, disable_created_metrics

        disable_created_metrics()
        self._mappings = yaml.safe_load(mapping.read_text())["mappings"]
        self._registry = CollectorRegistry()
        self._metrics: dict[str, Any] = {}

    def answer(self) -> Answer:
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return Answer(200, CONTENT_TYPE_LATEST, generate_latest(self._registry))

    def receive(self, line: str) -> None:
        """Count a line of StatsD, with tags as InfluxDB has them; one that no mapping names is left out."""
        from prometheus_client import Counter, Gauge, Histogram

        label, _, rest = line.partition(":")
        value, kind = rest.split("|")[:2]
        name, *tags = label.split(",")
        labels = dict(tag.split("=", 1) for tag in tags)
        for mapping in self._mappings:
            if found := re.fullmatch(re.escape(mapping["match"]).replace(r"\*", "([^.]*)"), name):
                break
        else:
            return
        name = re.sub(r"\$\{?(\d)\}?", lambda place: found[int(place[1])], mapping["name"])
        if kind == "c":
            self._metric(Counter, name.removesuffix("_total"), labels).inc(float(value))
        elif kind == "g":
            self._metric(Gauge, name, labels).set(float(value))
        else:
            buckets = mapping["histogram_options"]["buckets"]
            seconds = timedelta(milliseconds=float(value)).total_seconds()
            self._metric(Histogram, name, labels, buckets=buckets).observe(seconds)

    def _metric(self, kind: Any, name: str, labels: dict[str, str], **options: Any) -> Any:
        if name not in self._metrics:
            self._metrics[name] = kind(name, "Airflow", sorted(labels), registry=self._registry, **options)
        return self._metrics[name].labels(**labels)


@contextmanager
def running(port: int, mapping: Path) -> Iterator[str]:
    """Receive StatsD at a UDP port, and yield the address of ``/metrics``."""
    exporter = Exporter(mapping)
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock,
        ProbeServer("127.0.0.1", 0, {"/metrics": exporter.answer}) as probes,
    ):
        sock.bind(("127.0.0.1", port))

        def receive() -> None:
            while datagram := sock.recv(65536):
                for line in datagram.decode().splitlines():
                    exporter.receive(line)

        thread = Thread(target=receive, name="statsd-exporter")
        thread.start()
        try:
            yield f"127.0.0.1:{probes.port}"
        finally:
            # an empty datagram is the end
            sock.sendto(b"", sock.getsockname())
            thread.join()
