"""The transport of another package, which may inherit from the interface or only have its methods."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest

from airflow_delayed import delivery
from airflow_delayed.delivery import BUILT_IN, DelayedDelivery, SendReport, TopologyReport, delivery_for
from airflow_delayed.message import utcnow
from airflow_delayed.sending import Route


class Plain:
    """Inherits nothing, and delivers what it is given at once."""

    horizon = timedelta(0)

    def __init__(self, conn_id, *, lane=None, clock=None):
        self.conn_id = conn_id
        self.lane = lane

    def install(self, destinations, *, create_destinations=False, dry_run=False):
        return TopologyReport()

    def verify(self, destinations, *, max_delay=None):
        return TopologyReport()

    def check(self, message, now):
        pass

    def send(self, messages):
        return SendReport(sent=len(list(messages)))

    def close(self):
        pass


class Talkative(Plain):
    def advice(self, messages, delays):
        return f"{messages} messages"


class Inheriting(Plain, DelayedDelivery):
    def fits(self, extremes, now):
        return True


@pytest.fixture
def join(connect, monkeypatch):
    def joined(hook: type):
        connect("theirs", conn_type="pigeon")
        entry = SimpleNamespace(name="pigeon", value=f"{__name__}:{hook.__name__}")
        monkeypatch.setattr(delivery, "entry_points", lambda group: [entry])
        monkeypatch.setattr(delivery, "_load", lambda target: hook)
        assert "pigeon" not in BUILT_IN
        return delivery_for("theirs", lane="left")

    return joined


def test_one_that_inherits_nothing_has_the_defaults(join):
    found = join(Plain)
    assert type(found) is Plain
    assert (found.conn_id, found.lane) == ("theirs", "left")
    assert found.advice(3, timedelta(1)) is None
    assert found.dataset("mail") is None
    # an empty horizon makes no store of it
    assert found.is_store is False
    with found.kept_open():
        assert found.send([1, 2]).sent == 2
    assert not Route(delivery=found).fits(None, utcnow())


def test_what_it_has_of_its_own_stays(join):
    assert join(Talkative).advice(3, timedelta(1)) == "3 messages"
    found = join(Inheriting)
    assert found.fits(None, utcnow())
    assert found.advice(3, timedelta(1)) is None


def test_a_store_of_another_package_need_not_keep_anchors(join):
    class Holding(Plain):
        is_store = True

    found = join(Holding)
    assert found.is_store
    found.keep_anchor("turn", utcnow())
    assert found.anchor("turn") is None
    assert found.own_dataset() is None
