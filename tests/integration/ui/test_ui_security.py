"""The operations page lets nobody see or do what is not theirs, and takes no harm from what it is sent."""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from unittest.mock import AsyncMock

import pytest
from airflow.models.connection import Connection
from airflow.models.log import Log
from airflow.models.team import Team
from airflow.sdk import DAG
from airflow.utils.session import create_session
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import delete, select
from support.operations_page import PREFIX, ROLES, Page, dags
from support.standing import give_up, pause
from support.stores import Store, message, on_postgres_too

import airflow_delayed.ui as ui
from airflow_delayed.identity import Origin
from airflow_delayed.store.api import hash_of
from airflow_delayed.ui.app import create
from airflow_delayed.ui.hook_pool import TooSlow
from airflow_delayed.ui.plugin import LazyApp

LATER = datetime(2030, 5, 6, 7, 8, 9, tzinfo=timezone.utc)
#: Each route: its method, its path, what to ask, and who may: a role, or whoever may see the connection.
CHANGE = {"ids": ["m"], "dry_run": True}
PAUSE = {"selection": {"destination": "of no message"}, "dry_run": True}
ROUTES = [
    ("GET", "/", {}, "viewer"),
    ("GET", "/static/{name}", {"name": "app.js"}, "viewer"),
    ("GET", "/static/{hash_}/{name}", {"name": "app.js", "hash_": "0"}, "viewer"),
    ("GET", "/openapi.json", {}, "viewer"),
    ("GET", "/api/v1/connections", {}, "viewer"),
    ("GET", "/api/v1/health", {}, "viewer"),
    ("GET", "/api/v1/live", {}, "viewer"),
    ("GET", "/api/v1/stores/{connection_id}/failures", {}, "sees"),
    ("GET", "/api/v1/stores/{connection_id}/states", {"params": {"tag": "t"}}, "sees"),
    ("GET", "/api/v1/stores/{connection_id}/search", {"params": {"q": "m"}}, "sees"),
    ("GET", "/api/v1/stores/{connection_id}/summary", {}, "sees"),
    ("GET", "/api/v1/stores/{connection_id}/messages", {}, "sees"),
    ("GET", "/api/v1/stores/{connection_id}/message", {"params": {"id": "m"}}, "sees"),
    ("GET", "/api/v1/stores/{connection_id}/audit", {}, "sees"),
    ("GET", "/api/v1/stores/{connection_id}/body", {"params": {"id": "m"}}, "op"),
    ("POST", "/api/v1/stores/{connection_id}/cancel", {"json": CHANGE}, "op"),
    ("POST", "/api/v1/stores/{connection_id}/restore", {"json": CHANGE}, "op"),
    ("POST", "/api/v1/stores/{connection_id}/reschedule", {"json": {**CHANGE, "delay_seconds": 9}}, "op"),
    ("POST", "/api/v1/stores/{connection_id}/retry", {"json": CHANGE}, "op"),
    ("POST", "/api/v1/stores/{connection_id}/erase", {"json": CHANGE}, "op"),
    ("GET", "/api/v1/stores/{connection_id}/pauses", {}, "sees"),
    ("POST", "/api/v1/stores/{connection_id}/pause", {"json": PAUSE}, "op"),
    ("POST", "/api/v1/stores/{connection_id}/unpause", {"json": PAUSE}, "op"),
    ("GET", "/api/v1/rabbitmq/{connection_id}/summary", {}, "sees"),
    ("POST", "/api/v1/rabbitmq/{connection_id}/redrive", {"json": {"dry_run": True}}, "op"),
    ("GET", "/api/v1/sqs/{connection_id}/{queue}/summary", {"queue": "q"}, "sees"),
    ("POST", "/api/v1/sqs/{connection_id}/{queue}/redrive", {"queue": "q", "json": {"dry_run": True}}, "op"),
    ("GET", "/api/v1/stores/{connection_id}/timeline", {"params": {"seconds": 86400}}, "sees"),
]
#: Names of connections, to brokers that answer nobody.
BROKERS = ("rabbitmq", "sqs")
#: Answers that say where a broker is.
SHOW_WHERE = ("/api/v1/health", "/api/v1/live")
NO_RETRY = {"retries": {"total_max_attempts": 1}}
HOSTILE = [
    "'",
    '"; DROP TABLE "delayed_messages"; --',
    "' OR '1'='1",
    "%",
    "_",
    "\\",
    "%(id)s :id {0} $1",
    "<script>alert(1)</script>",
    "../../etc/passwd",
    "a\tb\r\nSet-Cookie: x=y",
    "é☃🐘" * 50,
    "x" * 200,
]


def asked(store: Store, route) -> tuple[str, str, dict[str, object]]:
    method, path, request_options, _ = route
    options = {name: one for name, one in request_options.items() if name in ("params", "json")}
    broker = next((name for name in BROKERS if f"/{name}/" in path), None)
    names = {name: one for name, one in request_options.items() if name not in options}
    return method, path.format(connection_id=broker or store.conn_id, **names), options


@pytest.fixture
def shown(store: Store, page: Page, connect, monkeypatch: pytest.MonkeyPatch) -> Page:
    """The page with one message, and brokers that answer nobody."""
    connect("rabbitmq", conn_type="rabbitmq", host="127.0.0.1", port=1, login="x", password="secret password")
    extra = {"region_name": "eu-central-1", "endpoint_url": "http://127.0.0.1:1", "config_kwargs": NO_RETRY}
    connect("sqs", conn_type="aws", login="x", password="secret password", extra=extra)
    monkeypatch.setenv("AIRFLOW__DELAYED__PAGE_RABBITMQ", "rabbitmq")
    monkeypatch.setenv("AIRFLOW__DELAYED__PAGE_SQS", "sqs:q")
    # a busy machine may take longer than the page waits
    monkeypatch.setattr("airflow_delayed.ui.api_live.PATIENCE", 60)
    hook = store.installed()
    hook.send([message("m", LATER, headers={"h": "secret header"}, body=b"secret body")])
    return page


def test_each_route_is_known_here(store: Store):
    found = {
        (method, route.path)
        for route in create().routes
        for method in route.methods
        if method in ("GET", "POST") and route.path != "/{path:path}"
    }
    assert found == {(method, path) for method, path, _, _ in ROUTES}


def test_nothing_without_login(store: Store, shown: Page):
    for route in [*ROUTES, ("GET", "/nothing", {}, ""), ("POST", "/", {}, ""), ("PUT", "/api/v1/connections", {}, "")]:
        method, path, options = asked(store, route)
        answer = shown.ask(method, path, None, **options)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "login"), route
        assert "secret" not in answer.text
        # nor with a token that is none of Airflow's
        for token in ("x", "eyJhbGciOiJub25lIn0.eyJzdWIiOiJhZG1pbiIsInJvbGUiOiJhZG1pbiJ9."):
            answer = shown.ask(method, path, None, headers={"Authorization": f"Bearer {token}"}, **options)
            assert answer.status_code in (401, 403), route
    # and a body that is no JSON is not read before either
    answer = shown.ask("POST", asked(store, ROUTES[17])[1], None, content=b"{", headers={"Content-Type": "text/plain"})
    assert answer.status_code == 401


@pytest.mark.parametrize("viewers, sees", [("connections", "op"), ("plugins", "viewer")])
def test_nobody_does_what_a_higher_role_may(
    store: Store, shown: Page, monkeypatch: pytest.MonkeyPatch, viewers: str, sees: str
):
    monkeypatch.setenv("AIRFLOW__DELAYED__VIEWERS", viewers)
    for route in ROUTES:
        method, path, options = asked(store, route)
        least = ROLES.index(sees if route[3] == "sees" else route[3])
        for role in ROLES[:least]:
            answer = shown.ask(method, path, role, **options)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden"), (role, route)
            assert "secret" not in answer.text
        for role in ROLES[least:]:
            # the brokers are none; whoever may ask is told so
            answer = shown.ask(method, path, role, **options)
            # a busy machine may take longer than the page waits
            for _ in range(20 if path in SHOW_WHERE else 0):
                if "too_slow" not in answer.text:
                    break
                time.sleep(0.5)
                answer = shown.ask(method, path, role, **options)
            wanted = 503 if any(f"/{name}/" in path for name in BROKERS) else 200
            assert answer.status_code == wanted, (role, route, answer.text)
            # where the brokers are is told to those who may read the connection
            shows_where = wanted == 503 or path in SHOW_WHERE
            assert ("127.0.0.1" in answer.text) == (shows_where and role in ("op", "admin"))
    for role, may in (("viewer", False), ("user", False), ("op", True), ("admin", True)):
        answer = shown.get("/api/v1/connections", role)
        visible = may or viewers == "plugins"
        names = [store.conn_id, *BROKERS] if visible else []
        assert ([one["connection_id"] for one in answer["connections"]], answer["hidden"]) == (names, not visible)
        assert all(one["may"] == {"read": may, "edit": may} for one in answer["connections"])


@pytest.fixture
def two_teams(store: Store, shown: Page, monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    """The connections belong to the team "ours", and there is an op of each team."""
    monkeypatch.setenv("AIRFLOW__CORE__MULTI_TEAM", "True")
    names = (store.conn_id, *BROKERS)
    with create_session() as session:
        session.add(Team(name="ours"))
        session.flush()
        session.add_all(Connection(conn_id=name, conn_type="generic", team_name="ours") for name in names)
    for team in ("ours", "theirs"):
        shown.add_user(f"op of {team}", "op", [team])
    yield shown
    with create_session() as session:
        session.execute(delete(Connection).where(Connection.conn_id.in_(names)))
        session.execute(delete(Team).where(Team.name == "ours"))


@pytest.mark.parametrize("viewers", ["connections", "plugins"])
def test_a_team_reaches_only_its_own_connections(
    store: Store, two_teams: Page, monkeypatch: pytest.MonkeyPatch, viewers: str
):
    monkeypatch.setenv("AIRFLOW__DELAYED__VIEWERS", viewers)
    for route in ROUTES:
        method, path, options = asked(store, route)
        if "{connection_id}" not in route[1]:
            continue
        answer = two_teams.ask(method, path, "op of ours", **options)
        assert answer.status_code in (200, 503), (route, answer.text)
        answer = two_teams.ask(method, path, "op of theirs", **options)
        if route[3] == "sees" and viewers == "plugins":
            assert answer.status_code in (200, 503)
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden"), route
        assert "secret" not in answer.text
    assert len(two_teams.get("/api/v1/connections", "op of ours")["connections"]) == 3
    found = two_teams.get("/api/v1/connections", "op of theirs")
    assert len(found["connections"]) == (0 if viewers == "connections" else 3)


def test_an_option_that_says_nothing_sensible_shows_nothing(store: Store, shown: Page, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AIRFLOW__DELAYED__VIEWERS", "everybody")
    answer = shown.ask("GET", f"/api/v1/stores/{store.conn_id}/summary", "admin")
    assert answer.status_code == 409
    assert "write connections or plugins" in answer.json()["error"]["message"]


def test_viewers_see_neither_bodies_nor_the_values_of_headers(
    store: Store, shown: Page, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AIRFLOW__DELAYED__VIEWERS", "plugins")
    for route in ROUTES:
        method, path, options = asked(store, route)
        assert "secret" not in shown.ask(method, path, "viewer", **options).text, route
    found = shown.ask("GET", f"/api/v1/stores/{store.conn_id}/message", "op", params={"id": "m"})
    assert "secret header" in found.text
    assert "secret body" not in found.text


def test_viewers_do_not_see_what_a_broker_said(store: Store, shown: Page, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AIRFLOW__DELAYED__VIEWERS", "plugins")
    hook = store.hooks[-1]
    hook.send(message(name, LATER) for name in ("failed", "retried"))
    give_up(hook, "failed", error="secret virtual host")
    pause(hook, ["retried"], timedelta(hours=1))
    store.sql(hook, """UPDATE {s}"delayed_messages" SET "LastError" = 'secret login' WHERE "Id" = 'retried'""")
    top = f"/api/v1/stores/{store.conn_id}"
    for role, may in (("viewer", False), ("op", True)):
        found = shown.ask("GET", f"{top}/messages", role).text
        found += shown.ask("GET", f"{top}/messages", role, params={"id": ["failed", "retried"]}).text
        assert ("secret" in found, "hidden" in found) == (may, not may)
        for name, secret in (("failed", "secret virtual host"), ("retried", "secret login")):
            answer = shown.get(f"{top}/message", role, id=name)
            assert (secret in str(answer["history"]), secret == answer["message"]["last_error"]) == (may, may)
            assert ("secret" in str(answer)) is may
    # where nothing failed, nothing is hidden
    assert shown.get(f"{top}/message", "viewer", id="m")["message"]["last_error"] is None


@pytest.mark.parametrize("known", [False, True])
def test_viewers_do_not_see_what_dispatchers_wrote(
    store: Store, shown: Page, monkeypatch: pytest.MonkeyPatch, known: bool
):
    monkeypatch.setenv("AIRFLOW__DELAYED__VIEWERS", "plugins")
    hook = store.hooks[-1]
    now = hook.now()
    reasons = {
        "connection": "10.1.2.3: login svc_admin refused at payroll",
        "leases": "on worker-7.internal",
        "database": "FATAL: role pg_admin may not update",
    }
    trouble = {"conn_id": "broker", "destination": None, "since": now.isoformat()}
    texts = ("svc_admin", "10.1.2.3", "payroll", "pg_admin", "worker-7.internal")
    with hook.engine.begin() as connection:
        row = {"ConnIds": '["broker"]', "StartedAt": now, "SeenAt": now, "Host": "worker-7.internal", "DagId": "theirs"}
        rows = [
            {**row, "Id": kind, "Troubles": json.dumps([{**trouble, "kind": kind, "reason": reason}])}
            for kind, reason in reasons.items()
        ]
        connection.execute(hook.tables.dispatchers.insert(), rows)
    shown.pool.close()
    paths = (f"/api/v1/stores/{store.conn_id}/summary", "/api/v1/health", f"/api/v1/live?store={store.conn_id}")
    with dags(*[DAG("theirs")][:known]):
        for path in paths:
            for role, may in (("viewer", False), ("op", True)):
                answer = shown.ask("GET", path, role).text
                assert [text for text in texts if text not in answer] == [*texts][: 0 if may else None], (role, path)
                # the codes stay, and so does a DAG that the user may read
                assert all(code in answer for code in ("connection-fails", "lease-too-short", "dispatcher-fails"))
                shows_dispatchers = path != "/api/v1/health"
                assert ("theirs" in answer) == (shows_dispatchers and (may or known)), (role, path)
    # nor when the store has not answered, and the last figures are shown
    monkeypatch.setattr("airflow_delayed.ui.api_stores.figures", AsyncMock(side_effect=TooSlow("frozen")))
    answer = shown.ask("GET", "/api/v1/live", "viewer")
    assert answer.json()["connections"][0]["summary"]["dispatchers"]
    assert not [text for text in (*texts, "theirs") if text in answer.text]


def test_airflows_event_log_has_neither_an_erased_tag_nor_a_brokers_words(store: Store, shown: Page):
    top, tag, words = f"/api/v1/stores/{store.conn_id}", "jane.doe@example.org", "login svc_admin refused"
    filters = {"erase": {"tag": tag}, "cancel": {"tag": "t", "reason": words}}
    for action, chosen in filters.items():
        shown.post(f"{top}/{action}", "op", filter=chosen, dry_run=False)
    with create_session() as session:
        extras = session.scalars(select(Log.extra).where(Log.event.startswith("delayed_deliveries."))).all()
    erased, cancelled = sorted((one for one in extras if store.conn_id in one), key=lambda one: '"t"' in one)
    assert tag not in erased
    # as the audit has it, so that who knows the tag finds it
    assert hash_of(tag) in erased
    assert words not in cancelled
    assert '"tag": "t"' in cancelled


def sent_by(dag_id: str, store: Store, *ids: str) -> None:
    origin = Origin(dag_id=dag_id, run_id="r", task_id="t", map_index=-1)
    store.hook(origin=origin).send([message(name, LATER) for name in ids])


@pytest.mark.usefixtures("nightly")
def test_who_may_edit_a_dag_changes_what_it_sent(store: Store, shown: Page, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AIRFLOW__DELAYED__VIEWERS", "plugins")
    sent_by("nightly", store, "s1", "s2")
    top = f"/api/v1/stores/{store.conn_id}"
    for role, changes in (("viewer", []), ("user", ["s1", "s2"]), ("op", ["m", "s1", "s2"])):
        rows = shown.get(f"{top}/messages", role)["messages"]
        assert [one["message_id"] for one in rows if one["may_change"]] == changes
        assert shown.get(f"{top}/message", role, id="s1")["message"]["may_change"] is ("s1" in changes)
    for action in ("cancel", "restore", "reschedule", "retry"):
        more = {"delay_seconds": 9} if action == "reschedule" else {}
        by_dag = {"filter": {"dag_id": "nightly"}, "dry_run": True, **more}
        assert shown.error("POST", f"{top}/{action}", "viewer", json=by_dag) == (403, "forbidden")
        shown.post(f"{top}/{action}", "user", **by_dag)
        for selection in ({"ids": ["s1", "m"]}, {"ids": ["s1", "never"]}, {"filter": {"destination": "q"}}):
            answer = shown.ask("POST", f"{top}/{action}", "user", json={**selection, "dry_run": True, **more})
            assert answer.status_code == 403
            assert "right to edit the connection" in answer.json()["error"]["message"]
    assert shown.error("POST", f"{top}/erase", "user", json={"ids": ["s1"], "dry_run": True}) == (403, "forbidden")
    assert shown.post(f"{top}/cancel", "user", ids=["s1"], dry_run=False)["outcomes"] == {"cancelled": 1}
    # and takes that back; what nobody's DAG has sent needs the right to the connection
    shown.post(f"{top}/cancel", "op", ids=["m"], dry_run=False)
    left = shown.get(f"{top}/messages", "user", state=["cancelled"])["remembered"]
    assert {one["message_id"]: one["may_change"] for one in left} == {"m": False, "s1": True}
    assert shown.get(f"{top}/message", "user", id="s1")["remembered"]["may_change"]
    for selection in ({"ids": ["s1", "m"]}, {"filter": {"state": ["cancelled"]}}):
        wrong = {**selection, "dry_run": False}
        assert shown.error("POST", f"{top}/restore", "user", json=wrong) == (403, "forbidden")
    assert shown.post(f"{top}/restore", "user", ids=["s1"], dry_run=False)["outcomes"] == {"restored": 1}
    shown.post(f"{top}/cancel", "user", ids=["s1"], dry_run=False)
    by_dag = {"dag_id": "nightly", "state": ["cancelled"]}
    assert shown.post(f"{top}/restore", "user", filter=by_dag, dry_run=False)["outcomes"] == {"restored": 1}
    # nor does a filter say whether a reason is guessed right
    guess = {"filter": {"dag_id": "nightly", "reason": "secret"}, "dry_run": True}
    assert shown.error("POST", f"{top}/cancel", "user", json=guess) == (403, "forbidden")
    # the right to edit the DAG alone shows nothing, and changes nothing
    monkeypatch.setenv("AIRFLOW__DELAYED__VIEWERS", "connections")
    assert shown.error("POST", f"{top}/cancel", "user", json={"ids": ["s2"], "dry_run": False}) == (403, "forbidden")


@pytest.mark.parametrize("teams", [False, True])
def test_of_a_dag_that_airflow_does_not_have_the_right_to_the_connection_decides(
    store: Store, two_teams: Page, monkeypatch: pytest.MonkeyPatch, teams: bool
):
    monkeypatch.setenv("AIRFLOW__DELAYED__VIEWERS", "plugins")
    monkeypatch.setenv("AIRFLOW__CORE__MULTI_TEAM", str(teams))
    two_teams.add_user("editor", "user", ["ours"])
    top = f"/api/v1/stores/{store.conn_id}"
    # deleted, or of another Airflow on the same store
    sent_by("deleted", store, "s1")
    with dags(DAG("known"), team="ours"):
        sent_by("known", store, "s2")
        rows = two_teams.get(f"{top}/messages", "editor")["messages"]
        assert {one["message_id"]: one["may_change"] for one in rows} == {"m": False, "s1": False, "s2": True}
        assert two_teams.post(f"{top}/cancel", "editor", ids=["s2"], dry_run=False)["changed"] == 1
        for selection in ({"ids": ["s1"]}, {"filter": {"dag_id": "deleted"}}):
            change = {**selection, "dry_run": False}
            assert two_teams.error("POST", f"{top}/cancel", "editor", json=change) == (403, "forbidden")
        assert two_teams.post(f"{top}/cancel", "op of ours", ids=["s1"], dry_run=False)["changed"] == 1


def test_a_destination_is_paused_by_who_may_edit_the_connection(
    store: Store, two_teams: Page, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AIRFLOW__DELAYED__VIEWERS", "plugins")
    two_teams.add_user("editor of ours", "user", ["ours"])
    top = f"/api/v1/stores/{store.conn_id}"
    events = select(Log.event).where(Log.event.like("delayed_deliveries.%pause"))
    with create_session() as session:
        # of other tests
        before = session.scalars(events).all()
    selections = [{"destination": "q"}, {"deliver_conn_id": "broker"}]
    for action in ("pause", "unpause"):
        for selection in selections:
            ask = {"selection": selection, "dry_run": False, "because": "secret"}
            assert two_teams.post(f"{top}/{action}", "op of ours", **ask)["text"]
            for user in ("editor of ours", "op of theirs"):
                assert two_teams.error("POST", f"{top}/{action}", user, json=ask) == (403, "forbidden")
        shown = two_teams.get(f"{top}/pauses", "editor of ours")["pauses"]
        if action == "pause":
            assert [one["selection"] for one in shown] == selections
            assert {one["because"].partition(";")[0] for one in shown} == {"hidden"}
    assert [one.action for one in store.hook().audit(limit=4)] == ["unpause"] * 2 + ["pause"] * 2
    with create_session() as session:
        logged = Counter(session.scalars(events).all()) - Counter(before)
    assert logged == {"delayed_deliveries.pause": 2, "delayed_deliveries.unpause": 2}


def test_only_what_is_configured_is_reached(store: Store, shown: Page, connect, monkeypatch: pytest.MonkeyPatch):
    other = connect("another", conn_type="sqlite", host="/nowhere")
    monkeypatch.setenv("AIRFLOW__DELAYED__PAGE_RABBITMQ", "")
    for name in (other, "never", store.conn_id.upper(), "<script>", "a%2Fb"):
        for route in ROUTES:
            if "{connection_id}" in route[1]:
                path = route[1].format(connection_id=name, queue="q")
                options = {key: one for key, one in route[2].items() if key in ("params", "json")}
                assert shown.error(route[0], path, "admin", **options) == (404, "absent"), path
    # a store is no broker, and a queue that is not named is not looked at
    assert shown.error("GET", f"/api/v1/rabbitmq/{store.conn_id}/summary") == (404, "absent")
    assert shown.error("GET", f"/api/v1/sqs/{store.conn_id}/other/summary") == (404, "absent")
    for path in ("/nothing", "/static/index.html", "/static/..%2fapp.py", "/static/%2e%2e/app.py", "/static/x/nothing"):
        assert shown.error("GET", path) == (404, "absent"), path


@pytest.mark.parametrize(
    "headers, refused",
    [
        ({}, None),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "https://behind-a-proxy.example"}, None),
        ({"Origin": "http://testserver"}, None),
        ({"Origin": "https://airflow.example"}, None),
        ({"Sec-Fetch-Site": "cross-site"}, (403, "cross_site")),
        ({"Sec-Fetch-Site": "same-site"}, (403, "cross_site")),
        ({"Sec-Fetch-Site": "none"}, (403, "cross_site")),
        ({"Origin": "https://elsewhere.example"}, (403, "cross_site")),
        ({"Origin": "https://airflow.example.other.example"}, (403, "cross_site")),
        ({"Origin": "null"}, (403, "cross_site")),
        ({"Content-Type": "text/plain"}, (415, "not_json")),
        ({"Content-Type": "application/x-www-form-urlencoded"}, (415, "not_json")),
        ({"Content-Type": ""}, (415, "not_json")),
    ],
)
def test_other_sites_change_nothing(store: Store, shown: Page, monkeypatch: pytest.MonkeyPatch, headers, refused):
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "https://airflow.example/airflow")
    content = b'{"ids": ["m"], "dry_run": false}'
    headers = {"Content-Type": "application/json", **shown.cookie("admin"), **headers}
    answer = shown.ask("POST", f"/api/v1/stores/{store.conn_id}/cancel", None, content=content, headers=headers)
    if refused is None:
        assert answer.json()["outcomes"] == {"cancelled": 1}
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == refused
        assert store.hooks[-1].get("m").state == "waiting"


def test_a_request_has_an_end(store: Store, shown: Page):
    path = f"/api/v1/stores/{store.conn_id}/cancel"
    big = {"Content-Type": "application/json", "Content-Length": "4000001"}
    assert shown.ask("POST", path, content=b"{}", headers=big).status_code == 413
    chunks = {"Content-Type": "application/json"}
    assert shown.ask("POST", path, content=iter([b"{}"]), headers=chunks).status_code == 411
    # some servers pass both headers on, and read as much as comes
    both = {**chunks, "Content-Length": "2", "Transfer-Encoding": "chunked"}
    assert shown.ask("POST", path, content=b"{}", headers=both).status_code == 411
    # a thousand of the longest ids are well within, and a header of 64 kB too
    ids = [f"{number:03}" + "☃" * 247 for number in range(1000)]
    answer = shown.ask("POST", path, json={"ids": ids, "dry_run": True}, headers={"X-Long": "x" * 65_536})
    assert answer.json()["outcomes"] == {"absent": 1000}


@on_postgres_too
def test_hostile_texts_are_only_texts(store: Store, shown: Page):
    hook = store.hooks[-1]
    long = "v" * 65_536
    # an id is of printable characters without blanks, as SQS has it
    ids = [re.sub("[^!-~]", "_", text)[:120] + f"#{number}" for number, text in enumerate(HOSTILE)]
    hook.send(
        message(name, LATER, tag=text, destination=text, body=text.encode(), headers={"h": long, "t": text})
        for name, text in zip(ids, HOSTILE, strict=True)
    )
    top = f"/api/v1/stores/{store.conn_id}"
    for number, (name, text) in enumerate(zip(ids, HOSTILE, strict=True)):
        for query in ({"tag": text}, {"id": name}, {"destination": text}):
            assert [one["message_id"] for one in shown.get(f"{top}/messages", **query)["messages"]] == [name]
        assert shown.get(f"{top}/messages", dag_id=text, run_id=text, task_id=text)["messages"] == []
        answer = shown.ask("GET", f"{top}/message", params={"id": name})
        assert answer.json()["headers"]["cut"] == ["h"]
        assert answer.json()["headers"]["values"]["t"] == text
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert shown.get(f"{top}/body", id=name)["content"] == text
        moved = shown.post(f"{top}/reschedule", ids=[name], delay_seconds=number, dry_run=False)
        assert moved["messages"] == [{"message_id": name, "outcome": "rescheduled"}]
        assert shown.get(f"{top}/message", id=name)["history"][-1]["what"] == "reschedule"
        assert shown.post(f"{top}/cancel", filter={"tag": text}, dry_run=True)["matching"] == 1
        assert shown.post(f"{top}/cancel", filter={"tag": text + "x"}, dry_run=False)["total"] == 0
    assert {one.message_id for one in hook.list()} == {"m", *ids}


@pytest.mark.parametrize(
    "method, rest, options",
    [
        ("GET", "messages", {"params": {"id": "a\0b"}}),
        ("GET", "messages", {"params": {"id": "x" * 251}}),
        ("GET", "messages", {"params": {"id": ["x"] * 1001}}),
        ("GET", "messages", {"params": {"tag": ""}}),
        ("GET", "messages", {"params": {"limit": 0}}),
        ("GET", "messages", {"params": {"limit": 201}}),
        ("GET", "messages", {"params": {"limit": "9" * 5000}}),
        ("GET", "messages", {"params": {"after": "nonsense"}}),
        ("GET", "messages", {"params": {"after": "é\0"}}),
        ("GET", "messages", {"params": {"state": "lost"}}),
        ("GET", "messages", {"params": {"due_from": "2030-01-01T00:00:00"}}),
        ("GET", "messages", {"params": {"due_from": "0001-01-01T00:00:00+14:00"}}),
        ("GET", "messages", {"params": {"due_from": "yesterday"}}),
        ("GET", "messages", {"params": {"run_id": "r"}}),
        ("GET", "messages", {"params": {"dag_id": "d", "map_index": 2**31}}),
        ("GET", "messages", {"params": {"order": "1; DROP TABLE x"}}),
        ("GET", "message", {}),
        ("GET", "body", {"params": {"id": ""}}),
        ("POST", "cancel", {"content": b"{", "headers": {"Content-Type": "application/json"}}),
        ("POST", "cancel", {"content": b"\xff", "headers": {"Content-Type": "application/json"}}),
        ("POST", "cancel", {"content": b"[" * 100_000, "headers": {"Content-Type": "application/json"}}),
        (
            "POST",
            "cancel",
            {"content": b'{"ids": ["\\ud800"], "dry_run": true}', "headers": {"Content-Type": "application/json"}},
        ),
        ("POST", "cancel", {"json": []}),
        ("POST", "cancel", {"json": {"ids": ["m"]}}),
        ("POST", "cancel", {"json": {"ids": [], "dry_run": True}}),
        ("POST", "cancel", {"json": {"ids": "m", "dry_run": True}}),
        ("POST", "cancel", {"json": {"ids": [{"$ne": 1}], "dry_run": True}}),
        ("POST", "cancel", {"json": {"ids": ["m"], "filter": {"tag": "t"}, "dry_run": True}}),
        ("POST", "cancel", {"json": {"filter": {}, "dry_run": True}}),
        ("POST", "cancel", {"json": {"filter": {"tag": None}, "dry_run": True}}),
        ("POST", "cancel", {"json": {"filter": {"table": "x"}, "dry_run": True}}),
        ("POST", "cancel", {"json": {"ids": ["m"], "dry_run": True, "actor": "somebody else"}}),
        ("POST", "reschedule", {"json": {"ids": ["m"], "dry_run": True}}),
        ("POST", "reschedule", {"json": {"ids": ["m"], "dry_run": True, "delay_seconds": -1}}),
        ("POST", "reschedule", {"json": {"ids": ["m"], "dry_run": True, "delay_seconds": 1e300}}),
        ("POST", "reschedule", {"json": {"ids": ["m"], "dry_run": True, "due_at": "9999-12-31T23:59:59-12:00"}}),
        ("POST", "retry", {"json": {"filter": {"state": ["due"]}, "dry_run": True}}),
    ],
)
def test_what_makes_no_sense_is_refused(store: Store, shown: Page, method, rest, options):
    answer = shown.ask(method, f"/api/v1/stores/{store.conn_id}/{rest}", **options)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid"), answer.text
    assert "DROP TABLE" not in answer.text
    assert store.hooks[-1].get("m").due_at == LATER


def test_the_page_loads_nothing_from_elsewhere(store: Store, shown: Page):
    answer = shown.ask("GET", "/", "viewer")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"https?:|\*", policy)
    assert answer.headers["cache-control"] == "no-cache"
    # each script has an address and no text, and there is no style and no handler in the page itself
    assert re.findall(r"<script[^>]*>([^<]*)</script>", answer.text) == [""] * answer.text.count("<script")
    assert not re.search(r"<style|\sstyle=|\son\w+=|https?://", answer.text)
    names = re.findall(r'"(static/[^"]+)"', answer.text)
    assert names
    for name in names:
        file = shown.ask("GET", f"/{name}", "viewer")
        assert file.status_code == 200, name
        assert file.headers["cache-control"] == "private, max-age=31536000, immutable"
        assert file.headers["content-security-policy"] == policy
        assert file.headers["content-type"].partition(";")[0] in ("text/css", "text/javascript", "image/svg+xml")
    assert shown.ask("GET", "/static/app.js").headers["cache-control"] == "no-cache"
    assert shown.ask("GET", "/api/v1/connections").headers["cache-control"] == "no-store"
    assert "/api/v1/stores/{connection_id}/cancel" in shown.get("/openapi.json", "viewer")["paths"]


def test_without_airflows_login_all_is_closed(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "airflow.api_fastapi.core_api.security", None)
    for name in [
        name for name in sys.modules if name.startswith("airflow_delayed.ui.") and not name.endswith(".plugin")
    ]:
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(ui, name.rpartition(".")[2])
    root = FastAPI()
    root.mount(PREFIX, LazyApp())
    client = TestClient(root)
    for route in [*ROUTES, ("GET", "/nothing", {}, "")]:
        method, path, options = asked(store, route)
        answer = client.request(method, PREFIX + path, **options)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "closed"), route
