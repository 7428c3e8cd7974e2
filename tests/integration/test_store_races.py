"""Changing one's mind while dispatchers are at work: each message is changed or arrives, never both, never neither."""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone

import pytest
from support.stores import Store, Transport, message, store_fixture  # noqa: F401 - a fixture

LATER = datetime(2030, 5, 6, 7, 8, 9, 123456, tzinfo=timezone.utc)
MANY = 800
#: As by default: on MariaDB a dispatcher and a change may lock each other up, and one of them does its part again.
PATIENT = {f"time_to_trigger_{what}_circuit_breaker": timedelta(seconds=30) for what in ("store", "fetch", "dispatch")}
TOO_LATE = {"in flight", "handed over"}


@dataclass
class Gated(Transport):
    """Sends nothing before it may."""

    asked: threading.Event = field(default_factory=threading.Event)
    may: threading.Event = field(default_factory=threading.Event)

    def send(self, messages):
        self.asked.set()
        assert self.may.wait(120)
        return super().send(messages)


@pytest.mark.parametrize("change", ["cancel", "reschedule"])
def test_each_message_is_changed_or_arrives(store: Store, change):
    hook = store.installed()
    now = hook.now()
    hook.send(message(f"m{n:04}", now, tag="t") for n in range(MANY))
    done = threading.Event()
    transports = [Gated(), Gated()]
    faults = []

    def dispatch(transport: Transport) -> None:
        try:
            own = store.hook()
            while not done.is_set():
                store.dispatcher(own, transport, batch_size=20, **PATIENT).run()
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=dispatch, args=(transport,)) for transport in transports]
    for thread in threads:
        thread.start()
    ids = [f"m{n:04}" for n in range(MANY)]
    random.Random(7).shuffle(ids)
    options = {"due_at": LATER} if change == "reschedule" else {}
    found = {}
    try:
        for transport in transports:
            assert transport.asked.wait(120)
        for start in range(0, MANY, 200):
            found.update(getattr(hook, change)(ids[start : start + 200], **options))
            for transport in transports:
                transport.may.set()
    finally:
        done.set()
        for transport in transports:
            transport.may.set()
        for thread in threads:
            thread.join(120)
    assert faults == []
    # what was in flight and not sent was given back, so one pass more
    last = Transport()
    store.dispatcher(store.hook(), last).run()
    arrived = Counter(name for transport in [*transports, last] for name in transport.ids)
    changed = {name for name, outcome in found.items() if outcome.changed}
    late = {name for name, outcome in found.items() if outcome in TOO_LATE}
    assert changed | late == set(ids)
    assert set(arrived) == late
    assert set(arrived.values()) <= {1}
    assert {one.message_id for one in hook.list()} == (changed if change == "reschedule" else set())
    # the first ones were in flight, and the others of those asked for then were not
    assert changed
    assert late


def test_two_who_cancel_the_same(store: Store):
    """One of them did it, the other is told so; nobody waits for a lock that the other holds for long."""
    hook = store.installed()
    hook.send(message(f"m{n:04}", LATER, tag="t") for n in range(MANY))
    ids = [f"m{n:04}" for n in range(MANY)]
    found = []

    def cancel(given: list[str]) -> None:
        found.append(store.hook().cancel(given))

    threads = [threading.Thread(target=cancel, args=(given,)) for given in (ids, ids[::-1], ids[300:] + ids[:300])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(found) == 3
    for name in ids:
        outcomes = sorted(one[name].value for one in found)
        assert outcomes.count("cancelled") == 1, (name, outcomes)
        # in flight: the other one had the row for over half a second
        assert set(outcomes) <= {"cancelled", "already cancelled", "in flight"}
