"""The operations page's API on each database: figures, lists, one message, changes; with Airflow's own login."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from airflow.models.log import Log
from airflow.utils.session import create_session
from sqlalchemy import select, update
from support.operations_page import Page
from support.standing import give_up, hold, mark_dispatched, pause
from support.stores import Store, Transport, message, on_postgres_only, on_postgres_too

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.identity import Origin
from airflow_delayed.store.api import hash_of

LATER = datetime(2030, 5, 6, 7, 8, 9, 123456, tzinfo=timezone.utc)
SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)
NIGHTLY = Origin(dag_id="nightly", run_id="scheduled__2030", task_id="send", map_index=3)


@pytest.fixture
def hook(store: Store) -> DelayedStoreHook:
    """One message of each kind; its id says which."""
    made = store.installed()
    now = made.now()
    made.send(
        [
            message("due", now - 9 * SECOND, tag="t"),
            message("failed", now - 7 * SECOND, tag="t"),
            message("flying", now - 6 * SECOND),
            message("gone", now - 5 * SECOND),
            message("overdue", now - HOUR),
            message("retrying", now - 3 * SECOND),
            message("soon", now + HOUR / 2, tag="t", destination="r", headers={"Customer": "A & B", "n": "x" * 65_536}),
        ]
    )
    store.hook(origin=NIGHTLY).send([message("nightly", now + 3 * HOUR)])
    hold(made, "flying")
    mark_dispatched(made, "gone")
    give_up(made, "failed")
    pause(made, ["retrying"], HOUR)
    return made


def url(store: Store, rest: str) -> str:
    return f"/api/v1/stores/{store.conn_id}/{rest}"


def names(found) -> list[str]:
    return [one["message_id"] for one in found["messages"]]


@on_postgres_too
def test_the_figures(store: Store, hook: DelayedStoreHook, page: Page, monkeypatch: pytest.MonkeyPatch):
    # a slow machine may take longer for two answers than figures are kept
    monkeypatch.setattr("airflow_delayed.ui.hook_pool.CACHE_SECONDS", 15.0)
    found = page.get(url(store, "summary"), "op")
    figures = ("waiting", "due", "overdue", "in_flight", "retrying", "failed", "expired", "remembered")
    assert {name: found[name] for name in figures} == {
        "waiting": 2,
        "due": 2,
        "overdue": found["overdue"],
        "in_flight": 1,
        "retrying": 1,
        "failed": 1,
        "expired": 0,
        "remembered": 1,
    }
    # and the messages that have been due for 10 s by now
    assert 1 <= found["overdue"] <= 4
    dues = {one.message_id: one.due_at for one in hook.list()}
    assert datetime.fromisoformat(found["next_due"]) == dues["soon"]
    assert datetime.fromisoformat(found["oldest_due"]) == dues["overdue"]
    assert found["due_within_hour"] == 1
    last = found["last_dispatched"]
    assert (last["message_id"], last["destination"], last["dispatcher"]) == ("gone", "q", "d")
    assert sum(one["messages"] for one in found["by_minute"]) == 1
    assert sum(one["messages"] for one in found["by_hour"]) == 2
    (minute,) = (one["begin"] for one in found["by_minute"] if one["messages"])
    assert datetime.fromisoformat(minute) == dues["soon"].replace(second=0, microsecond=0)
    assert (len(found["by_minute"]), len(found["by_hour"])) == (60, 24)
    # they are kept for some seconds, and a change from here is seen at once
    hook.cancel("soon")
    again = page.get(url(store, "summary"), "op")
    assert again["waiting"] == 2
    assert again["age_seconds"] > 0
    page.post(url(store, "cancel"), ids=["nightly"], dry_run=False)
    assert page.get(url(store, "summary"), "op")["waiting"] == 0


FILTERS = [
    ({}, ["overdue", "due", "failed", "flying", "retrying", "soon", "nightly"]),
    ({"tag": "t"}, ["due", "failed", "soon"]),
    ({"tag": "T"}, []),
    ({"destination": "r"}, ["soon"]),
    ({"state": ["failed", "retrying"]}, ["failed", "retrying"]),
    ({"state": "in flight"}, ["flying"]),
    ({"id": ["soon", "due", "never"]}, ["due", "soon"]),
    ({"id": ["soon", "due"], "destination": "r"}, ["soon"]),
    ({"dag_id": "nightly"}, ["nightly"]),
    ({"dag_id": "nightly", "run_id": "scheduled__2030", "task_id": "send", "map_index": 3}, ["nightly"]),
    ({"dag_id": "nightly", "map_index": -1}, []),
    ({"dag_id": "Nightly"}, []),
]


def test_messages_are_found(store: Store, hook: DelayedStoreHook, page: Page):
    dues = {one.message_id: one.due_at for one in hook.list()}
    for query, ids in FILTERS:
        assert names(page.get(url(store, "messages"), "op", **query)) == ids
        if ids:
            last = {"due_from": dues[ids[-1]].isoformat(), "due_until": "9999-12-31T00:00:00Z"}
            assert names(page.get(url(store, "messages"), "op", **query, **last)) == ids[-1:]


def test_a_list_is_paged(store: Store, hook: DelayedStoreHook, page: Page):
    for size in (1, 2, 7):
        found, after = [], None
        while True:
            answer = page.get(url(store, "messages"), "op", limit=size, after=after)
            assert 0 < len(answer["messages"]) <= size
            found += names(answer)
            after = answer["next"]
            if after is None:
                break
        assert found == [one.message_id for one in hook.list()]


def test_what_is_gone_is_found_by_its_id(store: Store, hook: DelayedStoreHook, page: Page):
    found = page.get(url(store, "messages"), "op", id=["gone", "soon", "never"])
    assert names(found) == ["soon"]
    (gone,) = found["remembered"]
    left = page.get(url(store, "messages"), "op", state=["dispatched", "cancelled"])
    assert ([one["message_id"] for one in left["remembered"]], left["messages"]) == (["gone"], [])
    assert (gone["message_id"], gone["state"], gone["destination"]) == ("gone", "dispatched", "q")
    # it was due 5 s before it was taken
    assert 5 <= gone["late_seconds"] < 600
    detail = page.get(url(store, "message"), "op", id="gone")
    assert (detail["message"], detail["headers"], detail["body_bytes"]) == (None, None, None)
    (line,) = detail["history"]
    assert (line["what"], line["who"]) == ("dispatched", "dispatcher d")
    assert line["detail"].endswith(" s after it was due")


def test_one_message(store: Store, hook: DelayedStoreHook, page: Page, monkeypatch: pytest.MonkeyPatch):
    found = page.get(url(store, "message"), "op", id="soon")
    assert (found["message"]["state"], found["message"]["tag"], found["remembered"]) == ("waiting", "t", None)
    assert found["headers"]["names"] == ["Customer", "n"]
    assert found["headers"]["values"]["Customer"] == "A & B"
    # a value of 64 kB is cut, and said to be
    assert set(found["headers"]["values"]["n"]) == {"x"}
    assert len(found["headers"]["values"]["n"]) < 10_000
    assert found["headers"]["cut"] == ["n"]
    assert found["body_bytes"] == len(b"body of soon")
    assert [one["what"] for one in found["history"]] == ["stored"]
    monkeypatch.setenv("AIRFLOW__DELAYED__VIEWERS", "plugins")
    for role in ("viewer", "user"):
        seen = page.get(url(store, "message"), role, id="soon")
        assert seen["headers"] == {"names": ["Customer", "n"], "values": None, "cut": []}
        assert "A & B" not in str(seen)
        assert "body of" not in str(seen)
    assert page.error("GET", url(store, "message"), params={"id": "never"}) == (404, "absent")


def test_the_history_of_a_message(store: Store, hook: DelayedStoreHook, page: Page):
    store.hook(origin=NIGHTLY, on_conflict="replace").send([message("soon", LATER, body=b"another")])
    page.post(url(store, "reschedule"), "op", ids=["soon", "due"], due_at="2031-01-01T00:00:00Z", dry_run=False)
    page.post(url(store, "reschedule"), "admin", ids=["soon"], due_at="2032-01-01T00:00:00Z", dry_run=True)
    found = page.get(url(store, "message"), "op", id="soon")["history"]
    assert [(one["what"], one["who"]) for one in found] == [
        ("stored", None),
        ("replaced", "task nightly.send, run scheduled__2030"),
        ("reschedule", "user op"),
    ]
    assert found[-1]["detail"] == "to 2031-01-01T00:00:00+00:00; of 2 messages: 2 rescheduled"
    (stored, failed) = page.get(url(store, "message"), "op", id="failed")["history"]
    assert (failed["what"], failed["detail"]) == ("failed", "3 failed tries; queue 'q' is not there")
    (stored, tried) = page.get(url(store, "message"), "op", id="retrying")["history"]
    assert (tried["what"], tried["detail"]) == ("next try", "after 1 failed try: refused")
    assert stored["who"] is None
    page.post(url(store, "cancel"), "op", ids=["due"], dry_run=False)
    cancelled = page.get(url(store, "message"), "op", id="due")
    assert cancelled["remembered"]["state"] == "cancelled"
    assert [(one["what"], one["who"]) for one in cancelled["history"]][-1] == ("cancel", "user op")


def test_a_body(store: Store, page: Page):
    bodies = {
        "script": (b"<script>alert('\xc3\xa9')</script>\n", "text", "<script>alert('\xe9')</script>\n"),
        "nothing": (b"", "text", ""),
        "bytes": (b"\x00\xff", "hex", "00ff"),
    }
    store.installed().send(message(name, LATER, body=body) for name, (body, _, _) in bodies.items())
    for name, (body, form, content) in bodies.items():
        assert page.get(url(store, "body"), "op", id=name) == {
            "message_id": name,
            "bytes": len(body),
            "shown_bytes": len(body),
            "form": form,
            "content": content,
        }


def test_a_long_body_is_cut(store: Store, page: Page, monkeypatch: pytest.MonkeyPatch):
    hook = store.installed()
    hook.send([message("m", LATER, body="é".encode() * 50_000)])
    give_up(hook, "m")
    monkeypatch.setenv("AIRFLOW__DELAYED__PAGE_BODY_LIMIT", "1001")
    found = page.get(url(store, "body"), "op", id="m")
    assert (found["bytes"], found["shown_bytes"], found["form"]) == (100_000, 1001, "text")
    # the last character was cut in the middle
    assert found["content"] == "é" * 500
    monkeypatch.setenv("AIRFLOW__DELAYED__PAGE_BODY_LIMIT", "0")
    assert page.get(url(store, "body"), "op", id="m")["content"] == ""
    assert page.error("GET", url(store, "body"), params={"id": "never"}) == (404, "absent")


def test_messages_are_changed_by_their_ids(store: Store, hook: DelayedStoreHook, page: Page):
    asked = ["soon", "failed", "gone", "flying", "never"]
    wanted = {
        "soon": "cancelled",
        "failed": "cancelled",
        "gone": "dispatched",
        "flying": "in flight",
        "never": "absent",
    }
    for dry_run in (True, False):
        found = page.post(url(store, "cancel"), ids=asked, dry_run=dry_run)
        # a dispatcher was quicker: it is told for each
        assert {one["message_id"]: one["outcome"] for one in found["messages"]} == wanted
        assert (found["dry_run"], found["matching"], found["total"], found["changed"]) == (dry_run, 5, 5, 2)
        assert found["outcomes"]["cancelled"] == 2
        assert ("soon" in {one.message_id for one in hook.list()}) is dry_run
    moved = page.post(url(store, "reschedule"), ids=["due", "failed"], delay_seconds=3600, dry_run=False)
    assert moved["outcomes"] == {"rescheduled": 1, "already cancelled": 1}
    assert hook.get("due").due_at == datetime.fromisoformat(moved["due_at"])
    give_up(hook, "retrying")
    assert page.post(url(store, "retry"), ids=["retrying", "due"], dry_run=False)["outcomes"] == {
        "retried": 1,
        "unchanged": 1,
    }
    assert hook.get("retrying").state == "due"
    page.post(url(store, "erase"), ids=["retrying"], dry_run=False)
    assert hook.get("retrying").state == "erased"


@on_postgres_too
def test_messages_are_changed_by_a_filter(store: Store, hook: DelayedStoreHook, page: Page):
    would = page.post(url(store, "cancel"), filter={"tag": "t", "state": ["waiting", "failed"]}, dry_run=True)
    assert (would["matching"], would["matching_at_least"], would["changed"], would["next"]) == (2, False, 2, None)
    done = page.post(url(store, "cancel"), filter={"tag": "t", "state": ["waiting", "failed"]}, dry_run=False)
    assert done["outcomes"] == {"cancelled": 2}
    assert {one["message_id"] for one in done["messages"]} == {"soon", "failed"}
    moved = page.post(
        url(store, "reschedule"), filter={"dag_id": "nightly"}, due_at="2031-01-01T00:00:00+01:00", dry_run=False
    )
    assert moved["outcomes"] == {"rescheduled": 1}
    assert hook.get("nightly").due_at == datetime(2030, 12, 31, 23, tzinfo=timezone.utc)
    assert page.post(url(store, "retry"), filter={"destination": "q"}, dry_run=False)["total"] == 0


def test_a_change_says_what_a_broker_has_already(store: Store, hook: DelayedStoreHook, page: Page):
    hook.note_sent([message("direct", LATER, tag="t")])
    ahead = [{"deliver_conn_id": "broker", "messages": 1, "until": LATER.isoformat().replace("+00:00", "Z")}]
    for action, options in (("cancel", {}), ("reschedule", {"delay_seconds": 3600}), ("erase", {})):
        for asked in ({"filter": {"tag": "t"}}, {"ids": ["direct", "soon"]}):
            would = page.post(url(store, action), **asked, **options, dry_run=True)
            assert (would["out_of_reach"], would["out_of_reach_at_least"]) == (ahead, False)
    assert page.post(url(store, "retry"), filter={"tag": "t"}, dry_run=True)["out_of_reach"] == []
    assert page.post(url(store, "cancel"), filter={"tag": "t"}, dry_run=False)["out_of_reach"] == ahead


def test_a_criterion_that_is_null_changes_nothing(store: Store, hook: DelayedStoreHook, page: Page):
    before = list(hook.list()), list(hook.audit())
    names = ["tag", "destination", "reason", "due_from", "due_until", "state", "dag_id"]
    for name in [*names, "run_id", "task_id", "map_index"]:
        criteria = {"destination": "q", **({} if name in names else {"dag_id": "nightly"}), name: None}
        if name == "destination":
            criteria["tag"] = "t"
        for action in ("cancel", "restore", "reschedule", "retry", "erase"):
            body = {"filter": criteria, **({"delay_seconds": 5} if action == "reschedule" else {})}
            answer = page.ask("POST", url(store, action), json={**body, "dry_run": False})
            assert answer.status_code == 400, body
            assert f"{name} is null, which would select more messages, so nothing is changed" in answer.text
    answer = page.ask("POST", url(store, "cancel"), json={"ids": None, "filter": {"tag": "t"}, "dry_run": False})
    assert (answer.status_code, "ids is null" in answer.text) == (400, True)
    assert (list(hook.list()), list(hook.audit())) == before


def test_a_cancel_is_taken_back(store: Store, hook: DelayedStoreHook, page: Page, monkeypatch: pytest.MonkeyPatch):
    page.post(url(store, "cancel"), ids=["soon", "due", "failed", "nightly"], dry_run=False)
    detail = page.get(url(store, "message"), id="soon")
    until = datetime.fromisoformat(detail["remembered"]["restorable_until"])
    assert until == datetime.fromisoformat(detail["remembered"]["at"]) + timedelta(days=1)
    # the content is kept, and shown until then to those who may see it
    assert (detail["headers"]["names"], detail["body_bytes"]) == (["Customer", "n"], 12)
    assert page.get(url(store, "body"), id="soon")["bytes"] == 12
    assert page.error("GET", url(store, "body"), params={"id": "gone"}) == (404, "absent")
    listed = page.get(url(store, "messages"), state=["cancelled"])["remembered"]
    assert all(one["restorable_until"] for one in listed)
    assert [one["restorable_until"] for one in page.get(url(store, "messages"), id=["gone"])["remembered"]] == [None]
    # what has fallen due meanwhile is asked about
    would = page.post(url(store, "restore"), filter={"tag": "t", "state": ["cancelled"]}, dry_run=True)
    assert (would["matching"], would["outcomes"]) == (3, {"restored": 2, "overdue": 1})
    asked = {"ids": ["due", "soon", "gone"], "overdue_ok": True}
    done = page.post(url(store, "restore"), **asked, because="by mistake", dry_run=False)
    assert done["outcomes"] == {"restored": 2, "dispatched": 1}
    assert (hook.get("due").state, hook.get("soon").state) == ("due", "waiting")
    assert [one["what"] for one in page.get(url(store, "message"), id="soon")["history"]][-2:] == ["cancel", "restore"]
    (last, _) = hook.audit()
    assert (last.action, last.because, last.counts) == ("restore", "by mistake", {"restored": 2, "dispatched": 1})
    for action, states in (("restore", ["failed"]), ("cancel", ["cancelled"]), ("erase", ["dispatched"])):
        wrong = {"filter": {"state": states}, "dry_run": True}
        assert page.error("POST", url(store, action), json=wrong) == (400, "invalid")
    # an erase is final
    erased = page.post(url(store, "erase"), filter={"state": ["cancelled"], "dag_id": "nightly"}, dry_run=False)
    assert erased["outcomes"] == {"erased": 1}
    assert page.post(url(store, "restore"), ids=["nightly"], dry_run=False)["outcomes"] == {"already removed": 1}


@on_postgres_too
def test_until_when_a_message_can_be_cancelled(store: Store, page: Page):
    hook, own = store.installed(), store.hook(None)
    due = hook.now() + HOUR
    hook.send([message(name, due) for name in ("m", "failed", "retried")])
    store.hook(until_due=True).send([message("until-due", due)])
    own.send([message("own", due)])

    def until() -> dict[str, datetime | None]:
        page.pool.invalidate_store(store.conn_id)
        rows = page.get(url(store, "messages"))["messages"]
        found = {one["message_id"]: one["cancellable_until"] for one in rows}
        assert page.get(url(store, "message"), id="m")["message"]["cancellable_until"] == found["m"]
        return {name: text and datetime.fromisoformat(text) for name, text in found.items()}

    give_up(hook, "failed")
    # as long as no dispatcher has been there, nobody knows when one takes a message for a broker
    assert until() == {"m": None, "failed": None, "retried": None, "until-due": due, "own": due}
    pause(hook, ["retried"], HOUR / 2)
    retry = hook.get("retried").next_try
    # the one that looks furthest ahead
    for minutes in (15, 45):
        store.dispatcher(hook, Transport(), lookahead=timedelta(minutes=minutes)).run()
    assert hook.lookaheads() == {"broker": timedelta(minutes=45), hook.conn_id: timedelta(0)}
    wanted = {"m": due - timedelta(minutes=45), "failed": None, "retried": retry, "until-due": due, "own": due}
    assert until() == wanted
    store.dispatcher(hook, Transport(), lookahead=timedelta(days=365), deliver_conn_ids=["other"]).run()
    assert until() == wanted
    # one that may be taken now
    hook.reschedule(["m"], hook.now() + timedelta(minutes=44))
    assert until()["m"] is None


@pytest.fixture
def many(store: Store, monkeypatch: pytest.MonkeyPatch) -> DelayedStoreHook:
    """A store with 130 messages, of which one step changes 40."""
    hook = store.installed()
    hook.send(message(f"m{number:03}", LATER + number % 7 * SECOND, tag="t") for number in range(130))
    give_up(hook, *(f"m{number:03}" for number in range(0, 130, 10)))
    monkeypatch.setattr("airflow_delayed.ui.api_stores.MAX_CHANGED", 40)
    return hook


def steps(store: Store, page: Page, action: str, most: int, **body: object) -> Iterator[dict[str, Any]]:
    """Change step by step, as the page does, and yield the answer of each."""
    done: dict[str, Any] = {"next": None, "audit": None}
    while most > 0:
        asked = {**body, "most": most, "after": done["next"], "audit": done["audit"]}
        done = page.post(url(store, action), "op", **asked, dry_run=False)
        yield done
        most = 0 if done["next"] is None else most - done["total"]


@on_postgres_too
def test_many_are_changed_step_by_step_as_one_change(store: Store, many: DelayedStoreHook, page: Page):
    would = page.post(url(store, "cancel"), filter={"tag": "t"}, dry_run=True)
    assert (would["total"], would["matching"], would["matching_at_least"]) == (40, 130, False)
    assert (would["next"] is None, would["audit"]) == (False, None)
    found = list(steps(store, page, "cancel", 130, filter={"tag": "t"}, because="recall"))
    assert [one["changed"] for one in found] == [40, 40, 40, 10]
    assert sorted(name for one in found for name in names(one)) == [f"m{number:03}" for number in range(130)]
    assert list(many.list()) == []
    # all of it is one row of the audit, and what was only counted is none
    counts = [(one.who, one.counts, one.because) for one in many.audit()]
    assert counts == [("user op", {"cancelled": 130}, "recall")]
    assert {one["audit"] for one in found} == {str(one.seq) for one in many.audit()}
    # the others; an erase reaches what is cancelled too
    for action, options, outcomes in (
        ("restore", {"filter": {"tag": "t", "state": ["cancelled"]}}, {"restored": 130}),
        ("retry", {"filter": {"state": ["failed"]}}, {"retried": 13}),
        ("reschedule", {"filter": {"tag": "t"}, "due_at": LATER.isoformat()}, None),
        ("cancel", {"filter": {"tag": "t", "due_from": LATER.isoformat()}}, {"cancelled": 130}),
        ("erase", {"filter": {"tag": "t"}}, {"erased": 130}),
    ):
        found = list(steps(store, page, action, 200, **options))
        assert found[-1]["next"] is None
        first = next(iter(many.audit()))
        assert (first.action, str(first.seq)) == (action, found[0]["audit"])
        assert outcomes is None or first.counts == outcomes
    assert '"tag": "t"' not in str([one.selection for one in many.audit()])


def test_a_change_that_stops_leaves_the_others_as_they_are(store: Store, many: DelayedStoreHook, page: Page):
    change = steps(store, page, "cancel", 130, filter={"tag": "t"})
    next(change)
    # a dispatcher is beside it, and a message that is due before the place where it goes on is none of its
    many.send([message("early", LATER - SECOND, tag="t"), message("sent", many.now(), tag="other")])
    assert store.dispatcher(many, Transport()).run().dispatched == 1
    next(change)
    assert many.counts().waiting + many.counts().failed == 51
    assert many.get("early").state == "waiting"
    assert [one.counts for one in many.audit()] == [{"cancelled": 80}]


@on_postgres_only
def test_a_step_that_the_database_refuses_says_why_and_what_is_done_stays_done(
    store: Store, many: DelayedStoreHook, page: Page
):
    # a message of the third step
    store.sql(many, """ALTER TABLE {s}"delayed_messages_past" ADD CONSTRAINT "guard" CHECK ("Id" <> 'm006')""")
    change = steps(store, page, "cancel", 130, filter={"tag": "t"})
    last = [next(change) for _ in range(2)][-1]
    go_on = {"filter": {"tag": "t"}, "dry_run": False, "after": last["next"], "audit": last["audit"]}
    answer = page.ask("POST", url(store, "cancel"), "op", json=go_on)
    assert (answer.status_code, "guard" in answer.text, "m006" in answer.text) == (409, True, False)
    assert many.counts().waiting + many.counts().failed == 50
    assert [one.counts for one in many.audit()] == [{"cancelled": 80}]
    store.sql(many, """ALTER TABLE {s}"delayed_messages_past" DROP CONSTRAINT "guard\"""")
    again = list(steps(store, page, "cancel", 50, filter={"tag": "t"}))
    assert [one["changed"] for one in again] == [40, 10]
    assert list(many.list()) == []


def test_a_step_adds_to_no_other_change(store: Store, many: DelayedStoreHook, page: Page):
    first = next(steps(store, page, "cancel", 130, filter={"tag": "t"}))
    before = list(many.audit()), many.counts().waiting
    go_on = {"filter": {"tag": "t"}, "dry_run": False, "after": first["next"], "audit": first["audit"]}
    for action, role, other in (
        ("cancel", "admin", {}),
        ("erase", "op", {}),
        ("cancel", "op", {"filter": {"tag": "t", "destination": "q"}}),
        ("cancel", "op", {"because": "another reason"}),
        ("cancel", "op", {"audit": "999999"}),
    ):
        answer = page.ask("POST", url(store, action), role, json={**go_on, **other})
        assert (answer.status_code, "the audit has no such row" in answer.text) == (400, True), answer.text
    for wrong in ({"audit": "x"}, {"after": "nowhere"}, {"filter": None, "ids": ["m001"]}):
        assert page.error("POST", url(store, "cancel"), "op", json={**go_on, **wrong}) == (400, "invalid"), wrong
    assert (list(many.audit()), many.counts().waiting) == before
    assert page.post(url(store, "cancel"), "op", **go_on)["changed"] == 40


def test_no_more_are_changed_than_were_counted(store: Store, page: Page):
    hook = store.installed()
    hook.send(message(f"m{number}", LATER, tag="t") for number in range(5))
    counted = page.post(url(store, "erase"), filter={"tag": "t"}, dry_run=True)["matching"]
    hook.send(message(f"new{number}", LATER + SECOND, tag="t") for number in range(3))
    done = page.post(url(store, "erase"), filter={"tag": "t"}, most=counted, dry_run=False)
    assert (done["changed"], done["next"] is None) == (5, False)
    assert [one.message_id for one in hook.list()] == ["new0", "new1", "new2"]


def test_each_change_leaves_its_mark(store: Store, hook: DelayedStoreHook, page: Page):
    page.post(url(store, "cancel"), "op", ids=["soon", "gone"], dry_run=True)
    page.post(url(store, "cancel"), "op", ids=["soon", "gone"], dry_run=False, because="flown")
    page.post(url(store, "erase"), "admin", filter={"tag": "t"}, dry_run=False)
    audit = list(hook.audit())
    assert [(one.who, one.action) for one in audit] == [("user admin", "erase"), ("user op", "cancel")]
    recorded = page.get(url(store, "audit"), "op")["entries"]
    assert [one["because"] for one in recorded] == [None, "flown"]
    with create_session() as session:
        logs = session.scalars(select(Log).where(Log.event.startswith("delayed_deliveries.")).order_by(Log.id)).all()
        events = [(one.event, one.owner, one.extra) for one in logs if store.conn_id in (one.extra or "")]
    assert [one[:2] for one in events] == [("delayed_deliveries.cancel", "op"), ("delayed_deliveries.erase", "admin")]
    assert '"outcomes": {"cancelled": 1, "dispatched": 1}' in events[0][2]
    assert f'"filter": {{"tag": "{hash_of("t")}"}}' in events[1][2]
    assert "body of" not in str(events)


@pytest.mark.parametrize("store", ["postgres", "mariadb"], indirect=True)
def test_a_database_ends_by_itself_what_nobody_waits_for(store: Store, page: Page):
    store.installed()
    hook = asyncio.run(page.pool.call_store(store.conn_id, lambda hook: hook))
    limits = {"postgresql": ("SHOW statement_timeout", "30s"), "mysql": ("SELECT @@max_statement_time", 30)}
    question, wanted = limits[hook.engine.dialect.name]
    (row,) = store.sql(hook, question)
    assert row[0] == wanted


@on_postgres_too
def test_what_cannot_be_read_is_shown_as_unreadable(store: Store, hook: DelayedStoreHook, page: Page):
    poison = {
        "due": {"Headers": b"[" * 5000},
        "overdue": {"Headers": b'{"a": "\\ud800"}'},
    }
    with hook.engine.begin() as connection:
        for name, columns in poison.items():
            connection.execute(update(hook.table).where(hook.table.c.Id == name).values(**columns))
        connection.execute(update(hook.tables.failed).values(Headers=b"\xff", Reason="sabotage"))
    found = page.get(url(store, "messages"))
    assert len(found["messages"]) == 7
    for name in names(found):
        detail = page.get(url(store, "message"), id=name)
        assert (detail["headers"] is None) == (name in ("due", "overdue", "failed"))
    assert {one["message_id"]: one["state"] for one in found["messages"]}["failed"] == "failed"
    page.get(url(store, "summary"))
