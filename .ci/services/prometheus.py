"""A private Prometheus from Debian on loopback, without its system service."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from services import packages, process

PROMTOOL = "/usr/bin/promtool"
_PROGRAM = "/usr/bin/prometheus"


def require() -> None:
    """Install Prometheus and promtool, if they are missing."""
    packages.require(_PROGRAM, "prometheus")


class Prometheus:
    """A running server by its HTTP API."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an expression now; raises httpx.HTTPStatusError if it cannot be evaluated."""
        answer = self._http.post("/api/v1/query", data={"query": expression})
        return list(answer.raise_for_status().json()["data"]["result"])

    def rules(self) -> list[dict[str, Any]]:
        """Return all rules, with their health and last error."""
        groups = self._http.get("/api/v1/rules").raise_for_status().json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]


@contextlib.contextmanager
def running(targets: Mapping[str, str], rules: Sequence[Path] = ()) -> Iterator[Prometheus]:
    """Scrape each second until the block ends.

    :param targets: by job, the address of what has ``/metrics``.
    """
    require()
    folder = Path(tempfile.mkdtemp(prefix="delayed-prometheus-"))
    # YAML can be written as JSON
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(file) for file in rules],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [address]}]} for job, address in targets.items()
        ],
    }
    file, log = folder / "prometheus.yml", folder / "prometheus.log"
    file.write_text(json.dumps(config))
    address = f"127.0.0.1:{process.free_port()}"
    command = [_PROGRAM, f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
    try:
        with (
            process.running([*command, f"--web.listen-address={address}"], log=log),
            httpx.Client(base_url=f"http://{address}") as http,
        ):
            process.wait_for("Prometheus", lambda: http.get("/-/ready").raise_for_status().is_success, log=log)
            yield Prometheus(http)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
