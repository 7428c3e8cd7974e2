"""Who changed what: read from the audit, the newest first."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from hashlib import sha256

import pytest
from support.stores import Store, message, on_postgres_too

LATER = datetime(2030, 5, 6, 7, 8, 9, 123456, tzinfo=timezone.utc)


@on_postgres_too
def test_the_audit_is_read_newest_first(store: Store):
    hook = store.installed()
    names = [f"m{number}" for number in range(7)]
    hook.send(message(name, LATER, tag="t") for name in names)
    hook.reschedule(["m1", 'm"1%'], LATER + timedelta(days=1), actor="ann")
    between = hook.now()
    hook.cancel(names, actor="bob")
    hook.retry(tag="t", actor="ann")
    found = list(hook.audit())
    assert [(one.who, one.action, one.counts) for one in found] == [
        ("ann", "retry", {}),
        ("bob", "cancel", {"cancelled": 7}),
        ("ann", "reschedule", {"absent": 1, "rescheduled": 1}),
    ]
    assert found[0].selection == {"tag": "t"}
    assert found[1].selection == {"ids": 7, "first": ["m0", "m1", "m2", "m3", "m4"]}
    assert found[2].selection == {"ids": 2, "first": ["m1", 'm"1%'], "to": "2030-05-07T07:08:09.123456+00:00"}
    # an id that is named, not what looks like one
    assert [one.action for one in hook.audit(message_id="m1")] == ["cancel", "reschedule"]
    assert [one.action for one in hook.audit(message_id='m"1%')] == ["reschedule"]
    assert [[*hook.audit(message_id=name)] for name in ("m", "M1", "m6", "first", "%", "m_")] == [[]] * 6
    assert [one.action for one in hook.audit(since=between)] == ["retry", "cancel"]
    assert [one.action for one in hook.audit(message_id="m1", limit=1)] == ["cancel"]
    paged, after = [], None
    while page := list(hook.audit(limit=1, after=after)):
        paged += page
        after = page[-1].token
    assert paged == found
    for wrong in ("x", "", "-1", "9" * 30):
        with pytest.raises(ValueError, match="no token"):
            list(hook.audit(after=wrong))


def test_a_record_has_the_reason(store: Store):
    hook = store.installed()
    hook.send([message("m", LATER, tag="t")])
    hook.cancel(["m"], because='"late" ä')
    hook.reschedule(tag="t", delay=5, because="why")
    hook.purge(timedelta(days=1), because="x" * 2000)
    hook.retry(tag="t")
    assert [one.because for one in hook.audit()] == [None, "x" * 1000, "why", '"late" ä']
    assert [set(one.selection) for one in hook.audit()][0::3] == [{"tag"}, {"ids", "first"}]


def test_a_long_audit_is_read_in_pages(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("airflow_delayed.store.audit.AUDIT_PAGE", 3)
    hook = store.installed()
    for number in range(10):
        hook.cancel([f"m{number % 2}"], actor=f"{number}")
    assert [one.who for one in hook.audit()] == list("9876543210")
    assert [one.who for one in hook.audit(message_id="m0")] == list("86420")
    assert [one.who for one in hook.audit(message_id="m1", limit=4)] == list("9753")


@on_postgres_too
def test_an_erased_tag_is_in_no_record(store: Store):
    hook = store.installed()
    odd = 'Åsa "50%_\\'
    hook.send([message("a", LATER, tag=odd), message("b", LATER, tag=odd + "x"), message("c", LATER, tag=odd.upper())])
    for tag in (odd, odd + "x", odd.upper()):
        hook.reschedule(tag=tag, due_at=LATER + timedelta(days=1))
    hook.cancel(['"tag": "' + odd])
    hook.erase(tag=odd, dry_run=True)
    before = [one.selection for one in hook.audit()]
    assert [one.get("tag") for one in before] == [None, odd.upper(), odd + "x", odd]
    assert hook.erase(tag=odd).total == 1
    hidden = f"sha256:{sha256(odd.encode()).hexdigest()}"
    found = [one.selection for one in hook.audit()]
    assert [one.get("tag") for one in found] == [hidden, None, odd.upper(), odd + "x", hidden]
    # what else the records had is unchanged
    assert found[1:4] == before[:3]
    assert found[4] == {**before[3], "tag": hidden}
