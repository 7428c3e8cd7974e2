"""A checker of histories: clients, dispatchers and lost sessions at once, and an order that explains every answer.

For each id an order of its calls is searched in which one that ended before another began comes first, and each answer
is what the store, doing one call after the other, would have said. If there is none, it has contradicted itself.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import pytest
from sqlalchemy import Connection, event, text
from sqlalchemy.exc import DBAPIError
from support.lengths import length
from support.standing import give_up, hold, lock
from support.stores import Store, Transport, message

from airflow_delayed.delivery import SendReport
from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import DelayedMessage
from airflow_delayed.store.dispatch.report import DispatchFailed

pytestmark = pytest.mark.mariadb

ROUNDS = length("rounds of the history checker on each database", 4, 400)
CLIENTS, CALLS, IDS = 4, 10, 3
KINDS = ["replace", "replace", "keep", "cancel", "cancel", "restore", "restore", "erase", "retry", "retry"]
KINDS += ["get", "die", "purge", "peek"]
#: What is known of an id: where it is ("none", "waiting", "leased", "failed", "past"), its content, what became of it;
#: "cancelled failed" is a cancel of what had failed.
State = tuple[str, str | None, str | None]


class Call(NamedTuple):
    begin: float
    end: float
    name: str
    content: str
    answer: str  # "lost": the session ended, and it was done or not


#: One of those who work with a store at the same time, with connections of its own: a hook for each on_conflict.
Client = dict[str, DelayedStoreHook]
Outcomes = Iterator[tuple[str, State]]
#: What a change says of an id whose message is gone.
REMOVED = {None: "absent", "dispatched": "dispatched"}
REMOVED |= dict.fromkeys(("cancelled", "cancelled failed"), "already cancelled")


def sends(state: State, call: Call) -> Outcomes:
    where, old, _ = state
    if where == "none":
        yield "sent", ("waiting", call.content, None)
    elif call.name == "keep" or old in (None, call.content):
        yield "duplicate", state
    elif where in ("waiting", "failed"):
        yield "replaced", ("waiting", call.content, None)
    else:
        yield "not_replaced", state


def changes(state: State, call: Call) -> Outcomes:
    where, old, past = state
    if where in ("waiting", "leased", "failed"):
        yield "in flight", state  # another change may have it
    there, removed = where in ("waiting", "failed"), REMOVED.get(past, "already removed")
    if there and call.name != "retry":
        if call.name == "cancel":
            yield "cancelled", ("past", old, "cancelled" if where == "waiting" else "cancelled failed")
        else:
            yield "erased", ("past", None, "erased")
    elif there:
        yield ("unchanged", state) if where == "waiting" else ("retried", ("waiting", old, None))
    elif call.name == "erase" and where == "past":
        yield "in flight", state  # a restore or another erase may have it
        said = {"erased": "already removed", "dispatched": removed}
        yield said.get(past or "", "erased"), ("past", None, "erased")
    elif where != "leased":
        yield removed, state


def restores(state: State, call: Call) -> Outcomes:
    where, old, past = state
    cancelled = (past or "").startswith("cancelled")
    if where in ("waiting", "leased", "failed") or cancelled:
        yield "in flight", state  # another change may have it
    if where in ("waiting", "failed"):
        yield "already stored", state
    elif cancelled:
        yield "restored", ("waiting" if past == "cancelled" else "failed", old, None)
    elif where != "leased":
        yield REMOVED.get(past, "already removed"), state


def others(state: State, call: Call) -> Outcomes:
    where, old, past = state
    if call.name == "get":
        yield (
            {"none": "nothing", "past": (past or "").partition(" ")[0], "leased": "in flight"}.get(where, where),
            state,
        )
    elif call.name == "purge" and where == "failed":
        yield "purged", ("past", old, "purged")
    elif call.name == "die" and where == "waiting":
        yield "", ("dead", old, None)
    elif call.name == "claim" and (where, old) == ("waiting", call.content):
        yield "", ("leased", old, None)
    elif call.name == "settle" and (where, old) == ("leased", call.content):
        yield call.answer, ("past", old, "dispatched") if call.answer == "delivered" else ("failed", old, None)


RULES = {"replace": sends, "keep": sends, "cancel": changes, "erase": changes, "retry": changes, "restore": restores}


def outcomes(state: State, call: Call, *, doubt: bool) -> Outcomes:
    """Yield answers with the state after each; with ``doubt``, what waits may have a lease that nobody knows of."""
    both = state[0] == "dead" or (doubt and state[0] in ("waiting", "leased"))
    for where in ("waiting", "leased") if both else (state[0],):
        before: State = (where, *state[1:])
        for answer, then in RULES.get(call.name, others)(before, call):
            # as long as nothing has happened, it is not known whether a dead dispatcher's lease has ended
            yield answer, state if then == before else then


def explained(calls: Sequence[Call], state: State, *, doubt: bool) -> bool:
    """Whether there is an order of the calls, beginning in this state."""
    seen: set[tuple[frozenset[int], State]] = set()

    def search(left: frozenset[int], state: State) -> bool:
        if not left or (left, state) in seen:
            return not left
        seen.add((left, state))
        first_end = min(calls[number].end for number in left)
        for number in (one for one in left if calls[one].begin <= first_end):
            call = calls[number]
            # what became of a message is written down only if the lease was not lost
            if (call.answer == "lost" or (doubt and call.name == "settle")) and search(left - {number}, state):
                return True
            for answer, then in outcomes(state, call, doubt=doubt):
                if call.answer in (answer, "lost") and search(left - {number}, then):
                    return True
        return False

    return search(frozenset(range(len(calls))), state)


class Broker(Transport):
    """Refuses a third of all messages, and keeps when it was given which."""

    def send(self, messages) -> SendReport:
        taken = list(messages)
        self.refused |= {one.message_id for one in taken if random.random() < 1 / 3}
        self.took += [(time.monotonic(), one.message_id, one.body.decode()) for one in taken]
        return super().send(taken)


def ask(client: Client, kind: str, one: DelayedMessage) -> dict[str, str]:
    hook, name = client["keep"], one.message_id
    if kind in client:
        report = client[kind].send([one])
        counts = {"sent": report.sent, "replaced": report.replaced, "not_replaced": report.not_replaced}
        return {name: next((what for what, many in counts.items() if many), "duplicate")}
    if kind == "get":
        found = hook.get(name)
        state = "nothing" if found is None else str(getattr(found.state, "value", found.state))
        return {name: "waiting" if state in ("due", "retrying") else state}
    if kind == "purge":
        gone = hook.purge(timedelta(0), reason=["failed"])
        return {one: "purged" for one, outcome in gone.items() if outcome == "purged"}
    if kind not in ("die", "peek"):
        options = {"overdue_ok": True} if kind == "restore" else {}
        return {name: getattr(hook, kind)([name], **options)[name].value}
    with suppress(DBAPIError):  # what is in the way here is not done again
        if kind == "die":
            return dict.fromkeys(hold(hook, name, lease=timedelta(seconds=0.2)), "")
        with hook.engine.begin() as connection:
            lock(connection, hook.tables, name)
            time.sleep(0.02)
    return {}


class Round:
    """Some ids, and everything that is done to them at once; with ``kills``, sessions of the database are ended."""

    def __init__(self, store: Store, clients: Sequence[Client], number: int, *, kills: bool) -> None:
        self.store, self.clients, self.kills = store, clients, kills
        self.hook = clients[-1]["keep"]  # the session of this one is left alone
        self.chance = random.Random(number)
        self.now = self.hook.now() - timedelta(seconds=1)
        self.ids = [f"r{number}-{one}" for one in range(IDS)]
        self.calls: dict[str, list[Call]] = {name: [] for name in self.ids}
        self.over = threading.Event()

    def call(self, client: Client, kind: str, name: str, content: str) -> None:
        begin = time.monotonic()
        try:
            due = self.now + timedelta(days=name == self.ids[0])  # the first one is not dispatched before tomorrow
            answers = ask(client, kind, message(name, due, body=content.encode()))
        except TransportUnavailable:
            if not self.kills:
                raise
            answers = dict.fromkeys(self.ids if kind == "purge" else [name], "lost")
        for one, answer in answers.items():
            self.calls.get(one, []).append(Call(begin, time.monotonic(), kind, content, answer))

    def work(self, number: int) -> None:
        chance = random.Random(f"{self.ids} {number}")
        for step in range(CALLS):
            self.call(self.clients[number], chance.choice(KINDS), chance.choice(self.ids), f"{number}.{step}")

    def dispatch(self) -> None:
        patient = {f"time_to_trigger_{one}_circuit_breaker": timedelta(seconds=30) for one in ("store", "fetch")}
        patient["claim_timeout"] = timedelta(seconds=1 if self.kills else 30)
        while not self.over.is_set():
            begin, broker = time.monotonic(), Broker()
            broker.took = []
            with suppress(DispatchFailed):
                # a hook of its own: none is safe in two threads at once
                self.store.dispatcher(self.clients[-2]["keep"], broker, number_of_retries=0, **patient).run()
            for at, name, content in broker.took:
                became = "refused" if name in broker.refused else "delivered"
                settled = Call(at, time.monotonic(), "settle", content, became)
                self.calls.get(name, []).extend([Call(begin, at, "claim", content, ""), settled])

    def kill(self) -> None:
        end = "SELECT pg_terminate_backend" if self.hook.engine.dialect.name == "postgresql" else "KILL"
        with self.hook.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            while not self.over.wait(0.02):
                with suppress(DBAPIError, IndexError):
                    connection.execute(text(f"{end}({self.chance.choice(list(SESSIONS))})"))

    def play(self) -> None:
        failed = self.ids[1:]
        self.hook.send(message(name, self.now, body=b"old") for name in failed)
        give_up(self.hook, *failed)
        with ThreadPoolExecutor(CLIENTS + 2) as threads:
            others = [threads.submit(self.dispatch), *([threads.submit(self.kill)] if self.kills else [])]
            wait(clients := [threads.submit(self.work, number) for number in range(CLIENTS)])
            self.over.set()
        assert [one.exception() for one in (*others, *clients) if one.exception()] == []
        for name in self.ids:
            self.call(self.clients[-1], "get", name, "")
            calls = sorted(self.calls[name], key=lambda call: call.begin)
            state: State = ("failed", "old", None) if name in failed else ("none", None, None)
            history = "".join(
                f"\n{one.begin:.4f} {one.end:.4f} {one.name} {one.content}: {one.answer}" for one in calls
            )
            assert explained(calls, state, doubt=self.kills), f"no order explains {name}, {state[0]} at first:{history}"


SESSIONS: set[int] = set()  # that may be ended


def note_session(connection: Connection) -> None:
    driver = connection.connection.dbapi_connection
    SESSIONS.add(driver.info.backend_pid if connection.dialect.name == "postgresql" else driver.thread_id())


@pytest.mark.parametrize(
    "store, kills",
    # SQLite has no sessions to kill
    [("sqlite", False), *((name, kills) for name in ("postgres", "mariadb") for kills in (False, True))],
    indirect=["store"],
)
def test_every_answer_has_an_order_that_explains_it(store: Store, kills):
    store.installed()
    clients = [{mode: store.hook(on_conflict=mode) for mode in ("keep", "replace")} for _ in range(CLIENTS + 2)]
    SESSIONS.clear()
    for hook in [hook for one in clients[:-1] for hook in one.values()] if kills else ():
        event.listen(hook.engine, "begin", note_session)
    for number in range(ROUNDS):
        Round(store, clients, number, kills=kills).play()
