"""Counting what became of ids, and what is decided for each."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.store.changes import Cancel, Erase, Location, Purge, Reschedule, Restore, Retry
from airflow_delayed.store.outcomes import Outcome, Outcomes
from airflow_delayed.store.records import StoredMessage, place_of

NOW = datetime(2030, 1, 1, tzinfo=timezone.utc)
HOUR = timedelta(hours=1)
SOME = st.dictionaries(st.text("abc", max_size=3), st.sampled_from(Outcome))


@given(first=SOME, second=SOME, named=st.none() | st.integers(0, 3))
def test_whatever_is_noted_adds_up(first, second, named):
    second = {f"second {name}": outcome for name, outcome in second.items()}
    found = Outcomes(named)
    found.add(first)
    would = found.counts_with(second)
    found.add(second)
    wanted = Counter([*first.values(), *second.values()])
    assert found.counts == would == wanted
    assert found.total == len(first) + len(second)
    assert found.changed == sum(many for outcome, many in wanted.items() if outcome.changed)
    for outcome, many in wanted.items():
        assert list(found.values()).count(outcome) == (many if named is None else min(many, named))


@given(first=SOME, later=SOME)
def test_what_was_in_flight_is_told_once_more(first, later):
    pending = [name for name, outcome in first.items() if outcome is Outcome.IN_FLIGHT]
    # some do not match any more
    then = {name: later[name] for name in pending if name in later}
    found = Outcomes()
    found.add(first)
    would = found.counts_with(then, instead_of=pending)
    found.add(then, instead_of=pending)
    wanted = {**{name: outcome for name, outcome in first.items() if name not in pending}, **then}
    assert found == wanted
    assert found.counts == would == Counter(wanted.values())


ROW = {"Time": NOW + HOUR, "ExpiresAt": None, "Reason": "failed", "FailedAt": NOW - HOUR}
EXPIRED = {**ROW, "ExpiresAt": NOW, "Reason": "expired"}
KEPT = {**ROW, "Reason": None, "Until": NOW + HOUR}
SHORT = {**ROW, "ExpiresAt": NOW + 2 * HOUR}


def found(where, row=ROW, remembered=None) -> Location:
    return Location(message_id="m", where=where, row=row if where not in ("past", None) else {}, remembered=remembered)


@pytest.mark.parametrize(
    "change, one, outcome",
    [
        # nowhere
        (Cancel(), found(None), "absent"),
        (Retry(), found(None), "absent"),
        # gone
        (Cancel(), found("past", remembered="dispatched"), "dispatched"),
        (Reschedule(NOW), found("past", remembered="cancelled"), "already cancelled"),
        (Retry(), found("past", remembered="purged"), "already removed"),
        (Cancel(), found("past", remembered="erased"), "already removed"),
        # what another release may write: it is too late in any case
        (Cancel(), found("past", remembered="something else"), "dispatched"),
        # waiting
        (Cancel(), found("messages"), "cancelled"),
        (Erase(), found("messages"), "erased"),
        (Retry(), found("messages"), "unchanged"),
        (Reschedule(NOW), found("messages"), "rescheduled"),
        (Reschedule(NOW + HOUR), found("messages"), "unchanged"),
        # it must not be due when it expires, nor later
        (Reschedule(NOW + 2 * HOUR), found("messages", SHORT), "expires first"),
        (Reschedule(NOW + 2 * HOUR - timedelta(microseconds=1)), found("messages", SHORT), "rescheduled"),
        (Reschedule(NOW - HOUR), found("messages", EXPIRED), "expired"),
        # failed
        (Cancel(), found("failed"), "cancelled"),
        (Reschedule(NOW), found("failed"), "failed"),
        (Reschedule(NOW), found("failed", EXPIRED), "expired"),
        (Retry(), found("failed"), "retried"),
        (Retry(), found("failed", SHORT), "retried"),
        (Retry(), found("failed", EXPIRED), "expired"),
        # restored is what is kept, and waits or has failed as it did
        (Restore(), found("cancelled", KEPT, "cancelled"), "restored"),
        (Restore(), found("cancelled", KEPT), "restored"),
        (Restore(), found("cancelled", {**KEPT, "Until": NOW}, "cancelled"), "already cancelled"),
        (Restore(), found("cancelled", KEPT, "dispatched"), "dispatched"),
        (Restore(), found("cancelled", {**KEPT, "Time": NOW}, "cancelled"), "overdue"),
        (Restore(overdue_ok=True), found("cancelled", {**KEPT, "Time": NOW}, "cancelled"), "restored"),
        (Restore(overdue_ok=True), found("cancelled", {**KEPT, "ExpiresAt": NOW}, "cancelled"), "expired"),
        (Restore(), found("cancelled", {**KEPT, "Time": NOW, "ExpiresAt": NOW, "Reason": "failed"}), "restored"),
        (Restore(), found("messages"), "already stored"),
        (Restore(), found("failed"), "already stored"),
        (Restore(), found("past", remembered="cancelled"), "already cancelled"),
        (Restore(), found("past", remembered="erased"), "already removed"),
        (Restore(), found(None), "absent"),
        (Erase(), found("cancelled", KEPT, "cancelled"), "erased"),
        # purged is what has failed for long enough
        (Purge(NOW, ["failed"]), found("failed"), "purged"),
        (Purge(NOW, ["expired"]), found("failed"), "unchanged"),
        (Purge(NOW - HOUR, ["failed"]), found("failed"), "unchanged"),
        (Purge(NOW, ["failed"]), found("messages"), "unchanged"),
    ],
    ids=str,
)
def test_what_is_decided(change, one, outcome):
    assert change.decide(one, NOW) == outcome


@given(
    due=st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30), timezones=st.just(timezone.utc)),
    message_id=st.text(min_size=1, alphabet=st.characters(exclude_categories=["Cs"])),
)
def test_a_token_leads_back_to_its_message(due, message_id):
    fields = dict.fromkeys(StoredMessage.__dataclass_fields__)
    one = StoredMessage(**{**fields, "due_at": due, "message_id": message_id})
    assert one.token.replace("-", "").replace("_", "").isalnum()
    assert place_of(one.token) == (due, message_id)
