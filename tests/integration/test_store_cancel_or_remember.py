"""Cancelling messages and remembering unknown ids in one step, on every database; also beside a send of the same id."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from datetime import datetime, timedelta, timezone

import pytest
from sqlalchemy import Connection, Engine, event
from support.standing import give_up, hold, mark_dispatched
from support.stores import Store, message

pytestmark = pytest.mark.mariadb
servers_only = pytest.mark.parametrize("store", ["postgres", "mariadb"], indirect=True)

LATER = datetime(2090, 1, 1, tzinfo=timezone.utc)


def test_each_id_has_its_outcome_and_no_later_send_stores_it(store: Store):
    hook = store.installed()
    names = ["waiting", "failed", "flying", "dispatched", "cancelled"]
    hook.send(message(name, LATER) for name in names)
    give_up(hook, "failed")
    hold(hook, "flying")
    mark_dispatched(hook, "dispatched")
    hook.cancel(["cancelled"])
    assert hook.cancel_or_remember([*names, "unknown"], actor="DAG d, run r") == {
        "waiting": "cancelled",
        "failed": "cancelled",
        "flying": "in flight",
        "dispatched": "dispatched",
        "cancelled": "already cancelled",
        "unknown": "absent",
    }
    assert [one.message_id for one in hook.list()] == ["flying"]
    # nothing but the id and the time is there of it, and no list of cancelled messages shows it
    assert (hook.get("unknown").state, hook.get("unknown").destination) == ("erased", None)
    assert {one.message_id for one in hook.page(state="cancelled").remembered} == {"waiting", "failed", "cancelled"}
    other = [message(name, LATER + timedelta(hours=1)) for name in [*names, "unknown"]]
    again = store.hook(on_conflict="keep").send(other)
    assert (again.sent, again.duplicates) == (0, 6)
    # a success of which nothing waits is no change
    before = len(list(hook.audit()))
    assert hook.cancel_or_remember(["unknown", "another"], actor="d") == {
        "unknown": "already removed",
        "another": "absent",
    }
    changes = list(hook.audit())
    assert (len(changes), {one.who for one in changes[:2]}) == (before, {"DAG d, run r"})


def test_for_everybody_else_an_unknown_id_is_absent(store: Store):
    hook = store.installed()
    assert hook.cancel(["m"]) == {"m": "absent"}
    assert hook.get("m") is None
    assert hook.send([message("m", LATER)]).sent == 1


def gated(engine: Engine) -> tuple[threading.Event, threading.Event]:
    """Let each transaction wait before its commit; return the events of having come there, and of going on."""
    there, go_on = threading.Event(), threading.Event()

    @event.listens_for(engine, "commit")
    def commit(connection: Connection) -> None:
        there.set()
        assert go_on.wait(60)

    return there, go_on


@servers_only
@pytest.mark.parametrize("first", ["success", "failure"])
def test_a_send_of_the_same_id_at_this_moment_waits_and_so_is_waited_for(store: Store, first: str):
    hook = store.installed()
    remembering, sending = store.hook(), store.hook(on_conflict="keep")
    calls = {
        "success": lambda: dict(remembering.cancel_or_remember(["m"], actor="d")),
        "failure": lambda: sending.send([message("m", LATER)]).sent,
    }
    # what is asked once for each connection is asked now
    for one in (remembering, sending):
        one.known(["m"])
    at_commit, go_on = gated(remembering.engine if first == "success" else sending.engine)
    second = "failure" if first == "success" else "success"
    with ThreadPoolExecutor(2) as threads:
        begun = threads.submit(calls[first])
        assert at_commit.wait(60)
        waits = threads.submit(calls[second])
        with pytest.raises(TimeoutError):
            waits.result(0.5)
        go_on.set()
        found = {first: begun.result(60), second: waits.result(60)}
    wanted = ("absent", 0) if first == "success" else ("cancelled", 1)
    assert found == {"success": {"m": wanted[0]}, "failure": wanted[1]}
    assert list(hook.list()) == []
