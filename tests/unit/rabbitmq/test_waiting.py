from __future__ import annotations

from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.topics import delays

from airflow_delayed.rabbitmq.management import Facts, QueueFacts
from airflow_delayed.rabbitmq.topology import DELAYED, NSERVICEBUS_V1
from airflow_delayed.rabbitmq.waiting import waiting

NOW = datetime(2026, 1, 31, 8, 30, tzinfo=timezone.utc)
NAMES = [*DELAYED.level_names()]


@given(delays.filter(bool), st.data())
def test_the_time_span_of_a_level_always_has_the_true_remaining_delay(delay: int, data: st.DataObject) -> None:
    digits = data.draw(st.sampled_from([DELAYED.digits, NSERVICEBUS_V1.digits]))
    waited = data.draw(st.integers(0, delay - 1))
    # the levels take their time one after the other, the highest first
    passed, level = 0, digits.entry_level(delay)
    while waited >= passed + digits.wait(level):
        passed += digits.wait(level)
        level = digits.entry_level(delay - passed)
    assert 0 < delay - waited <= digits.longest(level)


@given(st.data())
def test_the_time_span_is_no_longer_than_it_has_to_be(data: st.DataObject) -> None:
    digits = data.draw(st.sampled_from([DELAYED.digits, NSERVICEBUS_V1.digits]))
    level = data.draw(st.sampled_from(digits.levels))
    assert digits.entry_level(digits.longest(level)) == level
    assert level == digits.levels[-1] or digits.entry_level(digits.longest(level) + 1) == level + 1


def counted(**counts: int) -> dict[str, int | None]:
    found: dict[str, int | None] = {**dict.fromkeys(NAMES, 0), DELAYED.unroutable_queue: 0}
    found.update({f"delayed.{name.replace('_', '.')}": count for name, count in counts.items()})
    return found


def listed(**stuck: int | None) -> dict[str, QueueFacts]:
    return {
        name: QueueFacts(name=name, type="quorum", stuck=stuck.get(name[8:].replace(".", "_"), 0)) for name in NAMES
    }


def test_what_is_stuck_is_counted_too() -> None:
    facts = Facts(queues=listed(hex_00000f0=10, hex_0000001=1))
    found = waiting(DELAYED, NOW, counted(hex_00000f0=4, hex_unroutable=2), facts)
    assert (found.messages, found.stuck, found.unroutable, found.why_unknown) == (15, 11, 2, None)
    assert str(found).splitlines() == [
        "queue                   messages  stuck  due from                   due by",
        "delayed.hex.0000001            1      1  2026-01-31 08:30:00+00:00  2026-01-31 08:30:01+00:00",
        "delayed.hex.00000f0           14     10  2026-01-31 08:30:00+00:00  2026-01-31 08:34:15+00:00",
        "all levels                    15     11",
        "delayed.hex.unroutable         2",
    ]


@pytest.mark.parametrize("queues", [None, {}, listed(hex_0000006=None)], ids=["no list", "not listed", "no statistics"])
def test_what_is_not_known_is_not_zero(queues: dict[str, QueueFacts] | None) -> None:
    found = waiting(DELAYED, NOW, counted(hex_0000006=3), Facts(queues=queues, why="there is no list"))
    assert (found.levels[5].stuck, found.stuck, found.messages) == (None, None, 3)
    lines = str(found).splitlines()
    assert lines[1].split()[:3] == ["delayed.hex.0000006", "3", "unknown"]
    assert lines[2].split() == ["all", "levels", "at", "least", "3", "unknown"]
    assert lines[-1].startswith("messages stuck in dead-lettering are not counted: ")


def test_a_queue_that_is_missing_holds_nothing() -> None:
    counts = {**counted(hex_0000002=1), "delayed.hex.f000000": None, DELAYED.unroutable_queue: None}
    found = waiting(DELAYED, NOW, counts, Facts(queues=listed()))
    assert (found.missing, found.messages, found.stuck, found.unroutable) == (("delayed.hex.f000000",), 1, 0, None)
    assert "missing: delayed.hex.f000000" in str(found)
    assert "no such queue" in str(found)


def test_classic_queues_keep_nothing_back() -> None:
    counts = dict.fromkeys(NSERVICEBUS_V1.level_names(), 0)
    assert waiting(NSERVICEBUS_V1, NOW, counts, Facts(why="there is no list")).stuck == 0


@pytest.mark.parametrize("name", ["delayed.hex.0000006", DELAYED.unroutable_queue])
def test_what_waits_in_a_queue_without_a_leader_is_unknown(name: str) -> None:
    members = ("rabbit@a", "rabbit@b", "rabbit@c")
    queue = QueueFacts(name=name, type="quorum", members=members, online=members[:1])
    # AMQP counts 0 in it
    found = waiting(DELAYED, NOW, counted(hex_0000008=2), Facts(queues={**listed(), name: queue}))
    unroutable = name == DELAYED.unroutable_queue
    assert (found.unavailable, found.missing, found.messages) == ((name,), (), 2 if unroutable else None)
    assert [finding.code for finding in found.findings] == ["no-leader"]
    assert found.why_unknown == "1 have no leader, or too few members that run"
    assert found.unroutable == (None if unroutable else 0)
    assert (found.levels[5].messages, found.stuck) == ((0, 0) if unroutable else (None, None))
    lines = str(found).splitlines()
    assert "no such queue" not in str(found)
    assert next(line for line in lines if line.startswith(name)).split()[1] == "unknown"
    assert lines[-1] == "messages of some queues are not counted: 1 have no leader, or too few members that run"


def test_a_classic_queue_whose_node_is_down_is_not_missing() -> None:
    names = [*NSERVICEBUS_V1.level_names()]
    # AMQP knows no such queue then, and the management API lists it
    queue = QueueFacts(name=names[3], state="down", node="rabbit@b")
    found = waiting(NSERVICEBUS_V1, NOW, {**dict.fromkeys(names, 0), names[3]: None}, Facts(queues={queue.name: queue}))
    assert (found.unavailable, found.missing) == ((names[3],), ())
    assert [(finding.code, finding.remedy) for finding in found.findings] == [("no-leader", "start rabbit@b")]
