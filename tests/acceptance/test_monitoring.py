"""The alert rules and the dashboard in Prometheus, over the metrics of a live Airflow and a dispatcher as a service."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
import yaml
from support import statsd_exporter

from acceptance.conftest import World
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import DelayedMessage
from services import process, prometheus

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]


def of_panels(dashboard: Path) -> Iterator[str]:
    """The queries of a dashboard, with what Grafana puts in for its variables."""
    for panel in json.loads(dashboard.read_text())["panels"]:
        for target in panel["targets"]:
            yield target["expr"].replace("$store", ".*").replace("$__rate_interval", "1m")


def of_alerts(rules: Path) -> Iterator[str]:
    """What each alert compares: the expressions have no result while nothing is wrong."""
    for group in yaml.safe_load(rules.read_text())["groups"]:
        for rule in group["rules"]:
            for side in re.split(r"\nunless on \(\w*\) ", rule["expr"].strip()):
                compared = re.fullmatch(r"absent\((.*)\)", side)
                yield compared[1] if compared else re.sub(r" > (\d+)$", r" > bool \1", side)


def test_each_panel_and_each_alert_has_data(world: World, here: Path, connect, tmp_path: Path):
    folder = here / "docs/operations/monitoring"
    expressions = [*of_panels(folder / "grafana-dashboard.json"), *of_alerts(folder / "alerts.yml")]
    assert len(expressions) > 20
    # what other tests of this Airflow have left to fail would be an alert
    connect("delayed_store", world.store_url)
    with closing(DelayedStoreHook("delayed_store")) as shared:
        shared.install([])
        shared.purge(timedelta(0), reason="failed")
    fields = {"conn_type": "sqlite", "host": str(tmp_path / "store.db")}
    world.live.call("POST", "/connections", connection_id="monitored_store", **fields)
    connect("monitored_store", **fields)
    connect("delayed_rabbitmq", **world.broker.connection)
    with closing(RabbitMQDelayHook("delayed_rabbitmq")) as broker:
        broker.install(["monitored"], create_destinations=True)
    port = process.free_port()
    service = ["airflow", "delayed", "dispatcher", "--store-conn-id", "monitored_store", "--port", str(port)]
    with (
        closing(DelayedStoreHook("monitored_store", "delayed_rabbitmq")) as store,
        statsd_exporter.running(world.statsd_port, folder / "statsd-mapping.yml") as exporter,
        prometheus.running({"airflow-statsd": exporter}, [folder / "alerts.yml"]) as server,
    ):
        store.install([])
        dispatcher = world.live.begin(*service, "--deliver-conn-ids", "delayed_rabbitmq")
        try:
            world.live.call("PATCH", "/dags/monitored", is_paused=False)
            run = world.live.trigger("monitored")
            assert world.live.wait("monitored", run) == "success", world.live.why("monitored", run, "dispatch")
            for number in range(2):
                # the second is a change of the figures that the first has made
                message = DelayedMessage(
                    destination="monitored", body=b"", due_at=store.now(), message_id=f"m{number}", headers={}
                )
                store.send([message])
                # after what the DAG has dispatched
                dispatched = f"sum(delayed_dispatched_total) > {number + 1}"
                process.wait_for(f"message {number}", lambda query=dispatched: server.query(query))

            for expression in expressions:
                process.wait_for(f"data of {expression}", lambda query=expression: server.query(query))
            # Prometheus itself can evaluate each, with its "for" and its labels
            rules = server.rules()
            assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
            assert [rule["name"] for rule in rules if rule.get("state") == "firing"] == []
            (sent,) = server.query("sum(delayed_sent_total)")
            (stored,) = server.query("sum(delayed_stored_total)")
            assert (sent["value"][1], stored["value"][1]) == ("1", "1")
            # the task that dispatched reported an empty store when it ended; the service may have looked before
            (waiting,) = server.query('delayed_store_waiting{store_conn_id="monitored_store"}')
            assert waiting["value"][1] == "0"
        finally:
            dispatcher.stop()
