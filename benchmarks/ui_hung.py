"""Airflow's other requests while the operations page asks a broker and a database that never answer.

    python benchmarks/ui_hung.py [--rounds 5] [--requests 200]

One api-server process (uvicorn) with the page and one more route, which like most of Airflow's runs in one of the
threads that all routes share. Each round measures that route alone, and then while so many requests for figures and
lists of a silent broker and a silent PostgreSQL (they accept connections, and answer nothing) are under way. Wanted: at
most 100 ms more.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from threading import Thread

_HOME = tempfile.TemporaryDirectory(prefix="delayed-hung-")
os.environ.update(
    AIRFLOW_HOME=_HOME.name, AIRFLOW__CORE__LOAD_EXAMPLES="False", AIRFLOW__LOGGING__LOGGING_LEVEL="CRITICAL"
)
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import httpx  # noqa: E402
import uvicorn  # noqa: E402
from support.operations_page import PREFIX, serving  # noqa: E402

from airflow_delayed.ui.hook_pool import HookPool  # noqa: E402

WANTED = 0.1
#: Requests of the other route that one figure is the median of.
PROBES = 30


def other() -> str:
    """Answer at once."""
    return "here"


async def probe(http: httpx.AsyncClient) -> float:
    taken = []
    for _ in range(PROBES):
        began = time.perf_counter()
        (await http.get("/other")).raise_for_status()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


async def measure(url: str, token: str, requests: int) -> tuple[float, float, Counter[int]]:
    """Return the other route's time alone and beside the requests, and how these were answered."""
    limits = httpx.Limits(max_connections=requests + 10)
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, headers=headers) as http:
        alone = await probe(http)
        paths = ("rabbitmq/silent_broker/summary", "stores/silent_store/summary", "stores/silent_store/messages")
        asked = [
            asyncio.create_task(http.get(f"{PREFIX}/api/v1/{paths[number % len(paths)]}")) for number in range(requests)
        ]
        await asyncio.sleep(1)
        beside = await probe(http)
        return alone, beside, Counter([(await one).status_code for one in asked])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=200)
    options = parser.parse_args()
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=500)).getsockname()[1]
        os.environ.update(
            AIRFLOW_CONN_SILENT_BROKER=f"amqp://somebody:secret@127.0.0.1:{silent}/",
            AIRFLOW_CONN_SILENT_STORE=f"postgresql://somebody:secret@127.0.0.1:{silent}/nothing",
            AIRFLOW__DELAYED__PAGE_RABBITMQ="silent_broker",
            AIRFLOW__DELAYED__PAGE_STORES="silent_store",
        )
        from airflow.utils.db import initdb

        initdb()
        page = stack.enter_context(serving(Path(_HOME.name), HookPool()))
        page.app.add_api_route("/other", other)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=500))
        server = uvicorn.Server(uvicorn.Config(page.app, log_level="critical"))
        thread = Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            token = page.cookie("op")["Cookie"].removeprefix("_token=")
            rounds = []
            for number in range(options.rounds):
                alone, beside, answers = asyncio.run(measure(url, token, options.requests))
                rounds.append(beside - alone)
                figures = ", ".join(f"{many} x {status}" for status, many in sorted(answers.items()))
                print(
                    f"round {number + 1}: alone {alone * 1000:6.1f} ms, beside {beside * 1000:6.1f} ms; {figures}",
                    flush=True,
                )
        finally:
            server.should_exit = True
            thread.join()
    median = statistics.median(rounds)
    print(
        f"\n{options.requests} requests that hang make another one {median * 1000:.1f} ms slower (median; from"
        f" {min(rounds) * 1000:.1f} to {max(rounds) * 1000:.1f}); wanted: at most {WANTED * 1000:.0f} ms"
    )


if __name__ == "__main__":
    main()
