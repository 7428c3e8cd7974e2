"""A statsd to which Airflow is told to send its metrics."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import pytest
from statsd import StatsClient


class Told(NamedTuple):
    name: str
    value: float
    #: c, ms or g.
    kind: str
    tags: dict[str, str]


class Client(StatsClient):
    """Airflow's client, which Airflow never closes."""

    made: ClassVar[list[Client]] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.made.append(self)


class Statsd:
    """Reads what was sent to a socket. On one machine a datagram is there when it is sent."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def told(self) -> list[Told]:
        """What was told since the last time, of ours, in order."""
        found = []
        while True:
            try:
                line = self._socket.recv(65536).decode()
            except BlockingIOError:
                return [one for one in found if one.name.startswith("delayed.")]
            label, _, rest = line.partition(":")
            value, _, kind = rest.partition("|")
            name, *tags = label.split(",")
            assert name.startswith("airflow.")
            found.append(
                Told(name.removeprefix("airflow."), float(value), kind, dict(tag.split("=", 1) for tag in tags))
            )

    def sums(self) -> dict[str, float]:
        """The sum of each counter since the last time."""
        sums: dict[str, float] = {}
        for one in self.told():
            if one.kind == "c":
                sums[one.name] = sums.get(one.name, 0) + one.value
        return sums


@contextmanager
def listening(*, tags: bool = True) -> Iterator[Statsd]:
    """Have Airflow send its metrics here, by its own configuration, as its task runner does.

    :param tags: False: by StatsD's own protocol, which has none.
    """
    from airflow.sdk.observability import stats
    from airflow.sdk.observability.metrics.stats_utils import get_stats_factory

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, pytest.MonkeyPatch.context() as patch:
        sock.bind(("127.0.0.1", 0))
        sock.setblocking(False)
        host, port = sock.getsockname()
        settings = {"ON": "True", "HOST": host, "PORT": str(port), "PREFIX": "airflow", "INFLUXDB_ENABLED": str(tags)}
        settings["CUSTOM_CLIENT_PATH"] = "support.statsd.Client"
        for name, value in settings.items():
            patch.setenv(f"AIRFLOW__METRICS__STATSD_{name}", value)
        stats.initialize(factory=get_stats_factory(), export_legacy_names=False)
        yield Statsd(sock)
        while Client.made:
            Client.made.pop().close()
    stats.initialize(factory=get_stats_factory(), export_legacy_names=False)
