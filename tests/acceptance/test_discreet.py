"""A run whose bodies, header values and passwords are nowhere in what Airflow keeps and logs, whatever goes wrong.

Searched are the whole of Airflow's database as text (XComs, rendered templates, serialized DAGs, task state, asset
events, notes, the event log; arguments of triggers decrypted, while they wait), and every file of its home, with all
logs. Bodies come from templates in ``messages=`` and from sources, so that they are neither in the DAG's own code nor
in another task's XCom, where they would be in any case.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from urllib.parse import quote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.leaks import leaks

from acceptance.conftest import World, create_database
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import DelayedMessage
from services import process, sqs

DAG = "discreet"
PASSWORDS = ("rabbitmq", "logged_out", "store", "sqs")
pytestmark = [pytest.mark.timeout(600), pytest.mark.long]


@dataclass
class Played:
    """A run that has ended but for the tasks that wait, and what nobody may find."""

    run_id: str
    shown: str
    #: By what has them: bodies and header values, the number, each connection's password.
    secrets: dict[str, str]


@pytest.fixture(scope="module")
def played(world: World, sqs_endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    live, folder = world.live, tmp_path_factory.mktemp("discreet")
    hidden = {name: f"hush{secrets.token_hex(12)}" for name in ("body", *PASSWORDS)}
    hidden["number"] = f"7{secrets.randbelow(10**15):015}"
    (folder / "secrets.json").write_text(json.dumps(hidden))
    _write_sources(folder, hidden)
    names = _connect(world, hidden, sqs_endpoint)
    process.wait_for(DAG, lambda: live.has(DAG), seconds=120, log=live.folder / "dag-processor.log")
    live.call("PATCH", f"/dags/{DAG}", is_paused=False)
    shown = f"shown{secrets.token_hex(12)}"
    run_id = live.trigger(DAG, folder=str(folder), shown=shown)

    def still() -> bool:
        states = live.states(DAG, run_id)
        return all(
            state == "deferred" if task == "dispatch" else state in ("success", "failed")
            for task, state in states.items()
        )

    process.wait_for("all but what waits", still, seconds=240, log=live.folder / "scheduler.log")
    process.wait_for("what cannot be dispatched", lambda: len(failed(world)) == 2, seconds=180)
    yield Played(run_id, shown, hidden)
    live.call("PATCH", f"/dags/{DAG}/dagRuns/{run_id}", state="failed")
    for name in names:
        live.call("DELETE", f"/connections/{name}")


def _write_sources(folder: Path, hidden: dict[str, str]) -> None:
    body, number = hidden["body"], hidden["number"]
    good = {"value": body, "headers": {"token": body}}
    # the first five that are wrong are told
    bad = [
        {**good, "delay_seconds": -1},
        {**good, "headers": {"token": [body]}},
        {**good, "headers": body},
        {**good, "due_at": "soon", "delay_seconds": None},
        {**good, "message_id": "x" * 300},
    ]
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in [good, *bad]))
    bad = [{"value": int(number)}, {**good, "another": body}, {**good, "body": body}, [body]]
    # and a line that was cut off
    (folder / "types.jsonl").write_text("\n".join([*map(json.dumps, bad), json.dumps(good)[:-5]]))
    pq.write_table(pa.table({"value": [[body]], "headers": [body]}), folder / "types.parquet")
    pq.write_table(pa.table({"value": [body, body], "destination": ["d" * 300, DAG]}), folder / "rows.parquet")


def _connect(world: World, hidden: dict[str, str], sqs_endpoint: str) -> list[str]:
    broker, user = world.broker, f"discreet-{secrets.token_hex(4)}"
    broker.manage("PUT", f"users/{user}", {"password": hidden["rabbitmq"], "tags": ""})
    allowed = {"configure": ".*", "write": ".*", "read": ".*"}
    broker.manage("PUT", f"permissions/{{vhost}}/{quote(user)}", allowed)
    # a queue that takes nothing is soon given up
    fields = broker.connection_with(confirm_timeout=15)
    rabbitmq = {**fields, "login": user, "password": hidden["rabbitmq"]}
    store = urlsplit(create_database(world.store_url, DAG))
    _make_role(world.store_url, DAG, hidden["store"])
    connections = {
        "rabbitmq": rabbitmq,
        "logged_out": {**rabbitmq, "password": hidden["logged_out"]},
        "store": {
            "conn_type": "postgres",
            "host": store.hostname,
            "port": store.port,
            "login": DAG,
            "password": hidden["store"],
            "schema": store.path.lstrip("/"),
        },
        "sqs": {**sqs.connection(sqs_endpoint), "password": hidden["sqs"]},
    }
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, fields in connections.items():
            extra = json.dumps(fields.get("extra", {}))
            world.live.call("POST", "/connections", connection_id=f"{DAG}_{name}", **{**fields, "extra": extra})
            monkeypatch.setenv(f"AIRFLOW_CONN_{DAG}_{name}".upper(), json.dumps(fields))
        RabbitMQDelayHook(f"{DAG}_rabbitmq").install([DAG], create_destinations=True)
        with closing(DelayedStoreHook(f"{DAG}_store", f"{DAG}_rabbitmq")) as hook:
            hook.install([])
            hook.send(_undeliverable(hook.now(), hidden["body"]))
    full = {"x-queue-type": "classic", "x-max-length": 1, "x-overflow": "reject-publish"}
    broker.declare(f"{DAG}-full", **full)
    with broker.channel() as channel:
        channel.confirm_delivery()
        channel.basic_publish("", f"{DAG}-full", b"")
    return [f"{DAG}_{name}" for name in connections]


def _undeliverable(now: datetime, body: str) -> list[DelayedMessage]:
    return [
        DelayedMessage(
            destination=name,
            body=body.encode(),
            due_at=now,
            message_id=name,
            headers={"token": body},
            tag="undelivered",
        )
        for name in (f"{DAG}-full", f"{DAG}-missing")
    ]


def searched(world: World, *texts: str) -> list[str]:
    return leaks(world.metadata_url, world.fernet_key, world.live.folder, *texts)


def failed(world: World) -> list[str]:
    """The last error of each message that could not be dispatched: its queue is full, or it was given up."""
    url = urlsplit(world.store_url)._replace(scheme="postgres", path=f"/{DAG}").geturl()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("AIRFLOW_CONN_DISCREET_KEPT", url)
        with closing(DelayedStoreHook("discreet_kept")) as store:
            refused = [message for message in store.list() if message.last_error]
            return [message.last_error for message in sorted(refused, key=lambda one: one.message_id)]


def _make_role(url: str, name: str, password: str) -> None:
    import psycopg2

    with closing(psycopg2.connect(url)) as database, database.cursor() as cursor:
        database.autocommit = True
        cursor.execute(f"create role {name} superuser login password %s", [password])


def test_each_task_went_the_way_that_it_was_to_go(world: World, played: Played) -> None:
    states = world.live.states(DAG, played.run_id)
    well = {task for task, state in states.items() if state == "success"}
    assert well == {"sent", "planned", "rejected", "store"}
    why = {
        "full": "refused by the broker",
        "logged_out": "login refused",
        "sqs": "has no destination",
        "dispatch": "messages are given up, such as",
        "refused_rows_jsonl": "5 of 6 rows cannot be sent",
        "refused_rows_parquet": "1 of 2 rows cannot be sent",
        "refused_types_jsonl": "5 of 5 rows cannot be sent",
        "refused_types_parquet": "column value is list",
    }
    assert {task: says in world.live.log(DAG, played.run_id, task) for task, says in why.items()} == dict.fromkeys(
        why, True
    )


def test_the_search_finds_what_is_there(world: World, played: Played) -> None:
    found = searched(world, played.shown)
    assert {"dag_run.conf", "rendered_task_instance_fields.rendered_fields"} <= set(found)
    # of the trigger of the task that waits, and of a log
    found = searched(world, '"deliver_conn_ids":', "would send to discreet: 1 at once")
    assert "trigger.kwargs" in found
    assert any(place.startswith("logs/") and "task_id=planned" in place for place in found)


def test_no_body_header_or_password_is_kept_or_logged(world: World, played: Played) -> None:
    server = urlsplit(world.store_url).password
    assert server
    assert searched(world, *played.secrets.values(), server) == []


def test_the_store_keeps_no_body_with_the_error_of_what_it_could_not_dispatch(world: World, played: Played) -> None:
    full, missing = failed(world)
    assert ("refuses messages at present" in full, "has no destination" in missing) == (True, True), (full, missing)
    assert not [name for name, text in played.secrets.items() if text in full + missing]
