"""The page's first screen in one answer: verdict, figures, list and its count; failures by cause; the search."""

from __future__ import annotations

from datetime import timedelta
from threading import Event

import pytest
from sqlalchemy import Engine, event
from support.operations_page import Page
from support.standing import give_up, hold, mark_dispatched
from support.stores import Store, Transport, message, on_postgres_too

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.identity import Origin, key_id

HOUR = timedelta(hours=1)


def ids(page: dict) -> list[str]:
    return [one["message_id"] for one in page["messages"]]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer than the page waits."""
    monkeypatch.setattr("airflow_delayed.ui.api_live.PATIENCE", 60)


@on_postgres_too
def test_one_answer_has_verdict_figures_and_list(store: Store, page: Page):
    hook = store.installed()
    hook.send([message(f"m{number}", hook.now() + HOUR, tag="t" if number else None) for number in range(3)])
    found = page.get("/api/v1/live", "op", store=store.conn_id, tag="t", limit=1)
    assert found["health"]["status"] == page.get("/api/v1/health", "op")["status"]
    (connection,) = found["connections"]
    assert (connection["connection_id"], connection["kind"], connection["error"]) == (store.conn_id, "store", None)
    assert connection["summary"]["waiting"] == 3
    assert (ids(found["page"]), found["matching"], found["error"]) == (["m1"], {"count": 2, "at_least": False}, None)
    # without a store there is no list; and by ids there is nothing to count
    assert page.get("/api/v1/live", "op")["page"] is None
    by_id = page.get("/api/v1/live", "op", store=store.conn_id, id=["m0"])
    assert (ids(by_id["page"]), by_id["matching"]) == (["m0"], None)
    left = page.get("/api/v1/live", "op", store=store.conn_id, state=["dispatched"])
    assert (ids(left["page"]), left["matching"], left["error"]) == ([], None, None)
    assert page.error("GET", "/api/v1/live", "op", params={"store": "never"}) == (404, "absent")
    assert page.error("GET", "/api/v1/live", "viewer", params={"store": store.conn_id}) == (403, "forbidden")


def test_the_numbers_of_one_answer_agree(store: Store, page: Page):
    """Whatever is stored between two statements of the page, and while its figures are kept."""
    hook = store.installed()
    hook.send([message("late", hook.now() - HOUR), message("next", hook.now() + HOUR / 2)])
    stored = []

    def store_more(connection: object, cursor: object, statement: str, *_: object) -> None:
        if "Time" in statement and not stored:
            stored.append(statement)
            hook.send(message(f"late{number}", hook.now() - HOUR) for number in range(3))

    event.listen(Engine, "after_cursor_execute", store_more)
    try:
        found = page.get("/api/v1/live", "op")
    finally:
        event.remove(Engine, "after_cursor_execute", store_more)
    (cause,), (connection,) = found["health"]["causes"], found["connections"]
    assert stored
    assert (connection["summary"]["overdue"], connection["summary"]["due"]) == (1, 1)
    assert cause["what"].startswith("1 overdue, ")
    for state, number in ((None, 2), (["waiting"], 1), (["due", "in flight"], 1)):
        listed = page.get("/api/v1/live", "op", store=store.conn_id, state=state, limit=1)
        assert listed["connections"][0]["summary"]["at"] == connection["summary"]["at"]
        assert listed["matching"] == {"count": number, "at_least": False}


def test_a_connection_that_hangs_holds_up_nothing(store: Store, page: Page, monkeypatch: pytest.MonkeyPatch):
    hook = store.installed()
    hook.send([message("m", hook.now() + HOUR)])
    # so that only what hangs takes long
    page.get("/api/v1/live", "op", store=store.conn_id)
    monkeypatch.setattr("airflow_delayed.ui.api_live.PATIENCE", 8)
    page.pool.invalidate_store(store.conn_id)
    end = Event()

    def hangs(self: DelayedStoreHook, **_: object) -> None:
        end.wait(60)

    with monkeypatch.context() as patched:
        patched.setattr(DelayedStoreHook, "figures", hangs)
        found = page.get("/api/v1/live", "op", store=store.conn_id)
        end.set()
    (connection,) = found["connections"]
    assert (connection["summary"], connection["error"]["code"]) == (None, "too_slow")
    assert [cause["code"] for cause in found["health"]["causes"]] == ["silent"]
    assert ids(found["page"]) == ["m"]


@on_postgres_too
def test_all_of_a_customer_is_counted_by_state(store: Store, page: Page, monkeypatch: pytest.MonkeyPatch):
    hook = store.installed()
    run = store.hook(origin=Origin(dag_id="a dag", run_id="r", task_id="t", map_index=-1))
    run.send([message(name, hook.now(), tag="customer") for name in ("m0", "m1")])
    store.dispatcher(hook, Transport()).run()
    run.send([message(f"m{number}", hook.now() + HOUR, tag="customer") for number in range(2, 7)])
    hook.send([message("due", hook.now(), tag="customer"), message("other", hook.now() + HOUR, tag="other")])
    give_up(hook, "m2")
    hook.cancel(["m3"])
    hold(hook, "m4")
    url = f"/api/v1/stores/{store.conn_id}/states"
    found = {"waiting": 2, "due": 1, "in flight": 1, "failed": 1, "dispatched": 2, "cancelled": 1}
    assert page.get(url, "op", tag="customer") == {"counts": found, "at_least": False}
    # whatever the state that is listed is
    assert page.get(url, "op", tag="customer", state=["failed"])["counts"] == found
    del found["due"]
    assert page.get(url, "op", dag_id="a dag", run_id="r")["counts"] == found
    # by a destination nothing finds remembered ids quickly
    assert page.get(url, "op", destination="q")["counts"] == {"waiting": 3, "due": 1, "in flight": 1, "failed": 1}
    monkeypatch.setattr("airflow_delayed.store.counts.MOST_BY_STATE", 2)
    few = page.get(url, "op", tag="customer")
    assert (sum(few["counts"].values()), few["at_least"]) == (2 + 1 + 2, True)
    assert page.error("GET", url, "viewer", params={"tag": "customer"}) == (403, "forbidden")


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"due_from": "garbage"}, "due_from must be a date and time with a zone, such as 2030-01-31T12:00:00Z"),
        ({"due_until": "2030-01-31T12:00:00"}, "due_until must be a date and time with a zone, such as"),
        (
            {"state": "nonsense"},
            "state must be 'waiting', 'due', 'in flight', 'retrying', 'failed' or 'expired' or must be 'dispatched' or"
            " 'cancelled'",
        ),
        ({"id": "x" * 300}, "id may have 250 characters at most"),
        ({"tag": "\0"}, "tag has a character that it may not have"),
        ({"dag_id": "d", "map_index": "first"}, "map_index must be a whole number"),
        ({"dag_id": "d", "map_index": -2}, "map_index must be -1 or more"),
        ({"limit": 1000}, "limit must be 200 or less"),
        ({"run_id": "r"}, "run_id, task_id and map_index need dag_id"),
        ({"colour": "red"}, "colour is not known"),
        ({"after": "never"}, "after: after= is no token of a listed message"),
    ],
)
def test_wrong_input_is_named_by_its_field(store: Store, page: Page, wrong: dict[str, str], said: str):
    store.installed()
    answer = page.ask("GET", f"/api/v1/stores/{store.conn_id}/messages", "op", params=wrong)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid")
    assert answer.json()["error"]["message"].startswith(said)


@on_postgres_too
def test_failures_by_cause(store: Store, page: Page):
    hook = store.installed()
    hook.send(message(f"m{number}", hook.now(), destination="r" if number == 3 else "q") for number in range(5))
    for number in range(4):
        give_up(hook, f"m{number}", error="closed" if number else "refused")
    url = f"/api/v1/stores/{store.conn_id}"
    found = page.get(f"{url}/failures", "op")
    groups = [(one["reason"], one["destination"], one["count"], one["first_id"]) for one in found["groups"]]
    assert groups == [("closed", "q", 2, "m1"), ("refused", "q", 1, "m0"), ("closed", "r", 1, "m3")]
    assert not found["at_least"]
    assert ids(page.get(f"{url}/messages", "op", reason="closed", destination="q")) == ["m1", "m2"]
    answer = page.post(f"{url}/retry", "op", filter={"reason": "closed"}, dry_run=False)
    assert answer["outcomes"] == {"retried": 3}
    assert [one["reason"] for one in page.get(f"{url}/failures", "op")["groups"]] == ["refused"]
    # all that have failed
    assert page.post(f"{url}/retry", "op", filter={"state": ["failed"]}, dry_run=False)["outcomes"] == {"retried": 1}


def test_reasons_are_for_readers(store: Store, page: Page, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AIRFLOW__DELAYED__VIEWERS", "plugins")
    hook = store.installed()
    hook.send([message("m", hook.now())])
    give_up(hook, "m", error="secret virtual host")
    url = f"/api/v1/stores/{store.conn_id}"
    answer = page.ask("GET", f"{url}/failures", "viewer")
    assert answer.json()["groups"][0]["count"] == 1
    assert "secret" not in answer.text
    wanted = {"reason": "secret virtual host"}
    assert page.error("GET", f"{url}/messages", "viewer", params=wanted) == (403, "forbidden")
    found = page.get("/api/v1/live", "viewer", store=store.conn_id, **wanted)
    assert (found["page"], found["error"]["code"]) == (None, "forbidden")
    page.post(f"{url}/cancel", "op", filter=wanted, dry_run=False)
    assert "secret" not in page.ask("GET", f"{url}/audit", "viewer").text
    assert page.get(f"{url}/audit", "op")["entries"][0]["selection"] == wanted


@on_postgres_too
def test_a_search_finds_what_begins_with_a_text(store: Store, page: Page):
    hook = store.installed()
    printable = "".join(map(chr, range(33, 127)))
    names = [printable, "a%b", "a%bc", "axb", "A%b", "a_", "a\\", "gone", *(f"n{number}" for number in range(9))]
    hook.send(message(name, hook.now() + HOUR, tag="a tag", destination="a queue") for name in names)
    store.hook(origin=Origin(dag_id="a dag", run_id="r", task_id="t", map_index=-1)).send(
        [message("sent", hook.now() + HOUR)]
    )
    hook.send([message("left", hook.now() + HOUR, tag="customer-7")])
    mark_dispatched(hook, "gone")
    hook.cancel(["left"])
    give_up(hook, "a_")

    def search(text: str) -> list[tuple[str, str, bool]]:
        found = page.get(f"/api/v1/stores/{store.conn_id}/search", "op", q=text)
        return [(one["field"], one["value"], one["exact"]) for one in found["matches"]]

    assert search("a%b") == [("id", "a%b", True), ("id", "a%bc", False)]
    assert search("a_") == [("id", "a_", True)]
    assert search("a\\") == [("id", "a\\", True)]
    assert search("gone") == [("id", "gone", True)]
    assert search(printable) == [("id", printable, True)]
    assert search("n") == [("id", f"n{number}", False) for number in range(5)]
    assert search("a ") == [("tag", "a tag", False), ("destination", "a queue", False), ("dag_id", "a dag", False)]
    # all messages of the tag have left the store
    assert search("customer-7") == [("tag", "customer-7", True)]
    assert search("nothing") == []


@on_postgres_too
def test_a_search_finds_a_message_by_the_columns_of_its_id(store: Store, page: Page):
    hook = store.installed()
    keys = {"new": {"order_id": 1001}, "text": {"order_id": "1001"}, "two": {"line": 2, "order_id": 7}}
    ids = {name: key_id([*key], [*key.values()]) for name, key in keys.items()}
    hook.send(message(name, hook.now() + HOUR) for name in ids.values())
    mark_dispatched(hook, ids["two"])
    url = f"/api/v1/stores/{store.conn_id}/search"
    found = page.get(url, "op", q="order_id=1001")["matches"]
    assert found == [{"field": "id", "value": ids[name], "exact": True} for name in ("new", "text")]
    (found,) = page.get(url, "op", q="order_id=7, line=2")["matches"]
    assert found["value"] == ids["two"]
    assert page.get(url, "op", q="order_id=1002")["matches"] == []
