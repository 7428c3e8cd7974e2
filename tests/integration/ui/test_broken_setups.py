"""What the verdict says of broken set-ups: the one cause, what to do, since when; and that it takes it back.

A dispatcher as a service works in this process over a real RabbitMQ and a real database, through proxies that are cut
or hang. Messages fall due all the time. ``airflow delayed doctor`` has to say the same.
Within how many seconds a cause is reported, and taken back, is asserted in the long run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from threading import Event, Thread
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from airflow.models.dag import DagModel
from airflow.sdk import DAG
from airflow.utils.session import create_session
from sqlalchemy import Engine, event
from support.forked import Child
from support.lengths import LONG, TABLES, length
from support.management import made_up
from support.operations_page import Page, dags
from support.proxy import Proxy, proxy
from support.rabbitmq import VirtualHost, install
from support.serving import dispatch_for_ever
from support.stores import Store, message

from airflow_delayed.cli.doctor import examine
from airflow_delayed.cli.service import ConnectionLoop
from airflow_delayed.delivery import delivery_for
from airflow_delayed.errors import DelayedError
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.operators.dispatch import StoreDispatchOperator
from airflow_delayed.store.dispatch.dispatcher import Dispatcher
from airflow_delayed.store.policy import DispatchPolicy
from airflow_delayed.store.schema import VERSION

#: Seconds within which the verdict has to say a cause, and to take it back.
WANTED = 15.0
#: The same on a machine of which nothing is known.
PATIENCE = 90.0
TITLE = "broken set-ups: seconds until reported, and until taken back"


@dataclass
class World:
    """A store whose messages a service sends to RabbitMQ, and the page that shows both."""

    store: Store
    page: Page
    vhost: VirtualHost
    broker: Proxy
    connect: Callable[..., str]
    #: In front of the store's database, if that is a server.
    database: Proxy | None
    #: Ends what a set-up has begun.
    stack: ExitStack
    loops: list[ConnectionLoop] = field(default_factory=list)
    #: The store's connection, as Airflow has it.
    uri: str = ""

    def connect_rabbit(self, **changed: object) -> str:
        return self.connect("rabbit", **{**self.vhost.connection, "port": self.broker.port, **changed})

    def serve(self) -> None:
        hook = partial(self.store.hook, "rabbit")
        # no lease ends during a set-up, however slow the machine is
        policy = DispatchPolicy(claim_timeout=timedelta(minutes=10))
        self.loops.append(ConnectionLoop("rabbit", policy, hook, None, lambda: None))
        self.loops[-1].start()

    def stop(self) -> None:
        for loop in self.loops:
            loop.stop()
        deadline = time.monotonic() + PATIENCE
        while any(loop.running for loop in self.loops) and time.monotonic() < deadline:
            time.sleep(0.05)

    def health(self) -> dict[str, Any]:
        found: dict[str, Any] = self.page.get("/api/v1/health", "op")
        return found

    def until(self, what: str, holds: Callable[[dict[str, Any]], bool]) -> tuple[float, dict[str, Any]]:
        """Ask for the verdict, as the page does, until it is as wanted; return after how many seconds."""
        began = time.monotonic()
        while not holds(found := self.health()):
            assert time.monotonic() - began < PATIENCE, f"{what}: {found['status']} {found['causes']}"
            time.sleep(0.2)
        return time.monotonic() - began, found

    def examined(self) -> dict[str, str]:
        """What ``airflow delayed doctor`` says, by code."""
        found = examine({self.store.conn_id: [], "rabbit": []}, 15.0)
        findings = [one for examination in found.values() for one in examination.findings]
        return {str(one.to_json()["code"]): one.what for one in findings if one.severity != "ok"}


@pytest.fixture
def world(
    store: Store, page: Page, empty_vhost: VirtualHost, connect: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    monkeypatch.setenv("AIRFLOW__DELAYED__PAGE_RABBITMQ", "rabbit")
    # 5 s as an API server has it; a machine that runs all tests at once may need longer for a look
    monkeypatch.setattr(page.pool, "_seconds", length("seconds that a look of the page may take", 20.0, 5.0))
    with ExitStack() as stack:
        broker = stack.enter_context(proxy(empty_vhost.parameters.port, empty_vhost.parameters.host))
        uri, database = os.environ[f"AIRFLOW_CONN_{store.conn_id.upper()}"], None
        if (server := urlsplit(uri)).port:
            database = stack.enter_context(proxy(server.port, server.hostname or ""))
            uri = server._replace(netloc=f"{server.netloc.rpartition('@')[0]}@127.0.0.1:{database.port}").geturl()
            connect(store.conn_id, uri)
        made = World(store, page, empty_vhost, broker, connect, database, stack, uri=uri)
        made.connect_rabbit()
        with closing(RabbitMQDelayHook("rabbit")) as hook:
            install(hook, ["orders", "emails"], create_destinations=True)
        try:
            yield made
        finally:
            for each in (broker, database):
                if each is not None:
                    each.go_on()
            made.stop()


@contextmanager
def traffic(world: World) -> Iterator[None]:
    """Store a message for each destination, due at once, four times a second."""
    over = Event()

    def send() -> None:
        number = 0
        while not over.is_set():
            # what breaks the store breaks its senders too
            with suppress(DelayedError), closing(world.store.hook("rabbit")) as hook:
                while not over.wait(0.25):
                    now, number = hook.now(), number + 1
                    hook.send([message(f"{name}-{number}", now, destination=name) for name in ("orders", "emails")])

    thread = Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# -- the set-ups: each breaks something, and returns what repairs it ------------------------------------------------


def broker_hangs(world: World) -> Callable[[], object]:
    world.broker.hang()
    return world.broker.go_on


def broker_is_away(world: World) -> Callable[[], object]:
    world.connect_rabbit(port=1)
    world.broker.cut()
    return world.connect_rabbit


def login_is_refused(world: World) -> Callable[[], object]:
    world.connect_rabbit(password="wrong")
    world.broker.cut()
    return world.connect_rabbit


def too_many_connections(world: World) -> Callable[[], object]:
    limit = "vhost-limits/{vhost}/max-connections"
    world.vhost.manage("PUT", limit, {"value": 0})
    world.broker.cut()
    return lambda: world.vhost.manage("DELETE", limit)


def queue_is_gone(world: World) -> Callable[[], object]:
    world.vhost.manage("DELETE", "queues/{vhost}/emails")

    def repair() -> None:
        with closing(RabbitMQDelayHook("rabbit")) as hook:
            hook.install(["emails"], create_destinations=True)
        with closing(world.store.hook("rabbit")) as hook:
            hook.retry(destination="emails")
            # a dispatcher may have been about to give up what it took before the queue was there
            while "failed" in codes_of(world.until("the retry", lambda found: found["status"] != "failing")[1]):
                hook.retry(destination="emails")

    return repair


def queue_is_full(world: World) -> Callable[[], object]:
    full = {"max-length": 1, "overflow": "reject-publish"}
    policy = {"pattern": "^emails$", "apply-to": "queues", "definition": full}
    world.vhost.manage("PUT", "policies/{vhost}/full", policy)
    return lambda: world.vhost.manage("DELETE", "policies/{vhost}/full")


def right_is_missing(world: World) -> Callable[[], object]:
    """Take the right to write from the connection's user, who has it no more on its next channel."""
    user = world.vhost.parameters.credentials.username
    path = f"permissions/{{vhost}}/{quote(user, safe='')}"

    def allow(pattern: str) -> None:
        world.vhost.manage("PUT", path, {"configure": ".*", "write": pattern, "read": ".*"})
        world.broker.cut()

    allow("^$")
    return lambda: allow(".*")


def queue_is_of_another_type(world: World) -> Callable[[], object]:
    """Declare the queue of what has no destination as a classic one."""
    name = quote("delayed.hex.unroutable", safe="")
    queue: Any = world.vhost.manage("GET", f"queues/{{vhost}}/{name}")
    bindings: Any = world.vhost.manage("GET", f"queues/{{vhost}}/{name}/bindings")
    world.vhost.manage("DELETE", f"queues/{{vhost}}/{name}")
    arguments = {key: value for key, value in queue["arguments"].items() if key != "x-queue-type"}
    world.vhost.manage("PUT", f"queues/{{vhost}}/{name}", {"durable": True, "arguments": arguments})
    for one in bindings:
        if one["source"]:
            body = {"routing_key": one["routing_key"], "arguments": one["arguments"]}
            world.vhost.manage("POST", f"bindings/{{vhost}}/e/{quote(one['source'], safe='')}/q/{name}", body)

    def repair() -> None:
        with closing(RabbitMQDelayHook("rabbit")) as hook:
            hook.install(["orders", "emails"], replace=True)

    return repair


def quorum_is_lost(world: World) -> Callable[[], object]:
    """Let the management API say what it says of queues that have one member of three left: no single node can."""

    def answer(path: str) -> object:
        if path == "overview":
            return {"rabbitmq_version": "3.10.8", "node": "rabbit@node1"}
        if path.startswith("queues/"):
            queues: Any = world.vhost.manage("GET", "queues/{vhost}?columns=name,type,durable,arguments")
            nodes = [f"rabbit@node{number}" for number in (1, 2, 3)]
            return [{**queue, "members": nodes, "online": nodes[:1], "leader": None} for queue in queues]
        return None

    url = world.stack.enter_context(made_up(answer))
    world.connect_rabbit(extra={"management_url": url})
    return world.connect_rabbit


def two_versions(world: World) -> Callable[[], object]:
    """Let the tables be of a newer release."""
    hook = world.store.hook("rabbit")

    def record(version: int) -> None:
        with hook.engine.begin() as connection:
            connection.execute(hook.tables.version.update().values(Version=version))

    record(VERSION + 1)
    return lambda: record(VERSION)


def row_cannot_be_read(world: World) -> Callable[[], object]:
    hook = world.store.hook("rabbit")
    hook.send([message("poison", hook.now() + timedelta(hours=1), destination="orders")])
    spoilt = {"Headers": b"\xff\xfe\x00", "Time": hook.now()}
    with hook.engine.begin() as connection:
        table = hook.tables.messages
        connection.execute(table.update().where(table.c.Id == "poison").values(**spoilt))
    return lambda: hook.cancel(["poison"])


def dispatcher_never_started(world: World) -> Callable[[], object]:
    return world.serve


#: What dispatches in a set-up, besides services.
RUNNING: dict[str, Dispatcher | Child] = {}


def run_of_a_dag(world: World) -> None:
    """Let a task of a DAG dispatch until it is stopped."""
    if not RUNNING:
        with DAG("dispatch_rabbit") as dag:
            StoreDispatchOperator(task_id="t", store_conn_id=world.store.conn_id, deliver_conn_ids=["rabbit"])
        world.stack.enter_context(dags(dag))
        world.stack.callback(RUNNING.clear)
    hook = world.store.hook("rabbit")
    made = hook.dispatcher(["rabbit"], delivery_for, dag_id="dispatch_rabbit", stays=True)
    RUNNING["dag"] = world.stack.enter_context(closing(made))
    thread = Thread(target=lambda: made.run("stopped"))
    thread.start()
    world.stack.callback(thread.join)
    world.stack.callback(made.stop)


def dag_is_paused(world: World) -> Callable[[], object]:
    def pause(paused: bool) -> None:
        with create_session() as session:
            session.get(DagModel, "dispatch_rabbit").is_paused = paused

    def repair() -> None:
        pause(False)
        run_of_a_dag(world)

    RUNNING["dag"].stop()
    pause(True)
    return repair


def serve_in_a_process(world: World) -> None:
    child = Child(dispatch_for_ever, conn_id=world.store.conn_id, deliver_conn_id="rabbit")
    RUNNING["process"] = child
    world.stack.callback(RUNNING.clear)
    world.stack.callback(child.close)
    assert child.answer() == "ready"


def dispatcher_is_killed(world: World) -> Callable[[], object]:
    RUNNING["process"].kill()
    return world.serve


def store_login_is_refused(world: World) -> Callable[[], object]:
    server = urlsplit(world.uri)
    wrong = server._replace(netloc=f"{server.username}:wrong@{server.hostname}:{server.port}").geturl()
    world.connect(world.store.conn_id, wrong)
    return lambda: world.connect(world.store.conn_id, world.uri)


def database_is_frozen(world: World) -> Callable[[], object]:
    assert world.database is not None
    world.database.hang()
    return world.database.go_on


def disk_is_full(world: World) -> Callable[[], object]:
    """Let the file of the store not grow: SQLite says the same of a disk that is full."""
    hook, most = world.store.hook("rabbit"), [1]

    def limit(connection: Any) -> None:
        if connection.engine.url == hook.engine.url:
            # no less than it has
            connection.connection.dbapi_connection.execute(f"PRAGMA max_page_count = {most[0]}")

    event.listen(Engine, "begin", limit)
    world.stack.callback(event.remove, Engine, "begin", limit)
    with suppress(Exception), closing(world.store.hook("rabbit")) as filling:
        for number in range(1000):
            filling.send([message(f"filler-{number}", filling.now() + timedelta(days=9), body=b"x" * 3000)])
    return lambda: most.__setitem__(0, 2**30)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What the verdict has to say of a set-up."""

    breaks: Callable[[World], Callable[[], object]]
    codes: set[str]
    status: str = "failing"
    words: str
    remedy: str
    #: Within so many seconds.
    wanted: float = WANTED
    #: Begins what dispatches before; None: nothing does.
    starts: Callable[[World], object] | None = World.serve

    def __str__(self) -> str:
        return self.breaks.__name__


CASES = (
    Case(
        breaks=broker_hangs,
        codes={"silent", "unreachable"},
        words="rabbit",
        remedy="until then its messages wait",
    ),
    Case(breaks=broker_is_away, codes={"unreachable"}, words="nothing listens", remedy="whether its server runs"),
    Case(breaks=login_is_refused, codes={"unreachable"}, words="check user and password", remedy="login"),
    Case(
        breaks=too_many_connections,
        codes={"unreachable"},
        words="raise its limit max-connections",
        remedy="which clients hold them",
    ),
    Case(
        breaks=queue_is_gone,
        codes={"destination-missing", "failed"},
        words="destination 'emails'",
        remedy="airflow delayed install",
    ),
    Case(breaks=queue_is_full, codes={"destination-refuses"}, words="destination 'emails'", remedy="may be full"),
    Case(
        breaks=right_is_missing,
        codes={"destination-refuses"},
        words="all its messages fail",
        remedy="a right of the connection's user",
    ),
    Case(
        breaks=queue_is_of_another_type,
        codes={"differs"},
        words="wanted 'quorum'",
        remedy="replace=True",
        wanted=60,
    ),
    Case(
        breaks=quorum_is_lost,
        codes={"no-leader"},
        words="half of the members or more do not run",
        remedy="start rabbit@node2, rabbit@node3",
        wanted=60,
    ),
    Case(
        breaks=two_versions,
        codes={"version"},
        status="degraded",
        words="newer than this release's",
        remedy="update airflow-provider-delayed here",
    ),
    Case(
        breaks=row_cannot_be_read,
        codes={"failed"},
        status="degraded",
        words="cannot be read",
        remedy="airflow delayed cancel",
    ),
    Case(
        breaks=dispatcher_never_started,
        codes={"no-dispatcher"},
        words="no dispatcher was at work for it within a day",
        remedy="airflow delayed dispatcher --store-conn-id",
        starts=None,
    ),
    Case(
        breaks=dag_is_paused,
        codes={"no-dispatcher"},
        words="the DAG of the last dispatcher, dispatch_rabbit, is paused",
        remedy="unpause the DAG dispatch_rabbit",
        starts=run_of_a_dag,
    ),
    Case(
        breaks=dispatcher_is_killed,
        codes={"no-dispatcher"},
        words="its dispatcher gave its last sign of life at",
        remedy="look into the log of that service",
        starts=serve_in_a_process,
    ),
)
#: Of a database that is a server.
SERVER_CASES = (
    Case(breaks=store_login_is_refused, codes={"unreachable"}, words="password", remedy="login"),
    Case(
        breaks=database_is_frozen,
        codes={"silent", "unreachable"},
        words="does not answer",
        remedy="database or broker hangs",
    ),
)
FULL_DISK = Case(
    breaks=disk_is_full, codes={"dispatcher-fails"}, words="database or disk is full", remedy="error of the database"
)


#: One of each kind for make test: of a broker, of a destination, of dispatchers, of a database.
SHORT = {broker_is_away, queue_is_gone, dispatcher_never_started, database_is_frozen}


def chosen(cases: Iterable[Case]) -> list[Any]:
    return [pytest.param(case, id=str(case), marks=[] if case.breaks in SHORT else pytest.mark.long) for case in cases]


@pytest.mark.parametrize("case", chosen(CASES))
def test_the_verdict_says_the_cause_and_takes_it_back(world: World, case: Case):
    play(world, case)


@pytest.mark.parametrize("case", chosen(SERVER_CASES))
@pytest.mark.parametrize("store", ["postgres", "mariadb"], indirect=True)
def test_the_same_of_a_database(world: World, case: Case):
    play(world, case)


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
def test_the_same_of_a_full_disk(world: World):
    play(world, FULL_DISK)


def play(world: World, case: Case) -> None:
    """Break a set-up and repair it, and check what the page and the doctor say meanwhile."""
    if case.starts is not None:
        case.starts(world)
    world.until("all is well at first", lambda found: found["status"] == "ok")
    with ExitStack() as sending:
        if case.starts is not None:
            sending.enter_context(traffic(world))
            world.until("messages arrive", lambda found: found["status"] == "ok" and world.vhost.count("orders") > 0)
        repair = case.breaks(world)
        if case.starts is None:
            sending.enter_context(traffic(world))

        def is_said(found: dict[str, Any]) -> bool:
            return found["status"] == case.status and bool(case.codes & codes_of(found))

        said, found = world.until("the cause", is_said)
        first = found["causes"][0]
        assert case.words in f"{first['where']}: {first['what']}"
        assert case.remedy in first["remedy"]
        # nothing else is reported for as long as it lasts, and it does not begin again
        ends = time.monotonic() + length("seconds of a broken set-up", 2, 30)
        while time.monotonic() < ends:
            time.sleep(0.2)
            found = world.health()
            assert found["status"] == case.status, found
            assert codes_of(found) <= case.codes, found["causes"]
            # a dispatcher may have seen it before the page
            assert first["since"] is None or found["causes"][0]["since"] <= first["since"]
        examined = world.examined()
        assert case.codes & examined.keys(), examined
        repair()
        back, found = world.until("all is well again", lambda found: found["status"] == "ok")
    TABLES.setdefault(TITLE, []).append(f"{case}, {world.store.conn_id}: {said:.1f}, {back:.1f}")
    if LONG:
        assert max(said, back) <= case.wanted


def codes_of(found: dict[str, Any]) -> set[str]:
    return {one["code"] for one in found["causes"]}


def test_a_broker_is_looked_at_also_when_nothing_is_due(store: Store, page: Page, connect: Callable[..., str]):
    connect("rabbit", conn_type="rabbitmq", host="127.0.0.1", port=1)
    loop = ConnectionLoop("rabbit", DispatchPolicy(), partial(store.hook, "rabbit"), None, lambda: None)
    loop.start()
    began = time.monotonic()
    try:
        while not (causes := page.get("/api/v1/health", "op")["causes"]):
            assert time.monotonic() - began < PATIENCE
            time.sleep(0.2)
        (cause,) = causes
        assert (cause["code"], cause["severity"], cause["deliver_conn_id"]) == ("connection-fails", "error", "rabbit")
        assert "nothing listens on that host and port (nothing is overdue yet)" in cause["what"]
    finally:
        loop.stop()
        while loop.running and time.monotonic() - began < PATIENCE:
            time.sleep(0.05)
