"""Messages are looked for, read, cancelled, retried, rescheduled and erased on the page."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import demo_ui
import pytest
from support import axe
from support.browsed_page import Site, act, done, find, listed, look_up, rows, says

from airflow_delayed.store.dispatch.report import DispatchFailed
from services import process

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]


def test_all_of_one_customer_is_cancelled_and_both_logs_say_by_whom(site: Site) -> None:
    page = site.alone("op")
    look_up(page, "invoice-0", "id invoice-0")
    listed(page, lambda ids: ids == ["invoice-0"])
    page.click("button[aria-label='Remove id invoice-0']")
    look_up(page, "customer-5", "tag customer-5")
    found = listed(page, lambda ids: len(ids) > 5)
    says(page, f"{len(found)} messages")
    # with what was dispatched or cancelled before
    waiting = {name for name in found if site.state(name) in ("waiting", "due")}
    page.click("input[aria-label='Choose all on this page']")
    act(page, "Cancel…", "Cancel them")
    says(page, f"{len(waiting)} messages cancelled.")
    site.take(page, "cancelled")
    done(page)
    # they stay in view, counted, with their undo and, for those who may see it, their body
    assert {*listed(page, bool)} == {*found}
    page.wait_for("page.querySelector('[data-key=\"state Waiting\"]').innerText === 'Waiting 0'")
    says(page, "can be taken back until")
    name = min(waiting)
    page.evaluate(f"page.querySelector('[data-key=\"open {name}\"]').click()")
    page.click("dialog button", text="Show the body")
    page.wait_for("page.querySelector('dialog pre') !== null")
    page.press("Escape")
    page.wait_for("page.querySelector('dialog') === null")
    assert {site.state(name) for name in waiting} == {"cancelled"}

    with site.store() as store:
        record = next(iter(store.audit(limit=1)))
    assert ("op" in record.who, record.action) == (True, "cancel")
    with site.world.live.client() as http:
        events = http.get("/api/v2/eventLogs", params={"order_by": "-when", "limit": 50}).json()["event_logs"]
    assert any(event["owner"] == "op" and "cancel" in event["event"] for event in events), events


def test_a_cancel_is_taken_back(site: Site) -> None:
    page = site.alone("op")
    find(page, tag="customer-7", state="waiting")
    first, second, *_ = listed(page, lambda ids: len(ids) > 2)
    # it can be cancelled until it is due, which is not said twice
    assert "can be cancelled until" not in page.text()
    for name in (first, second):
        page.click(f"input[aria-label='Choose {name}']")
    act(page, "Cancel…", "Cancel them")
    # where the result stands
    page.click("dialog button", text="Take it back…")
    says(page, "2 messages match.")
    page.click("dialog footer button", text="Take it back")
    says(page, "2 messages restored.")
    done(page)
    assert {site.state(name) for name in (first, second)} == {"waiting"}
    # and later, from the list of what was cancelled; what has fallen due meanwhile is asked about
    listed(page, lambda ids: first in ids)
    for name in (first, second):
        page.click(f"input[aria-label='Choose {name}']")
    act(page, "Cancel…", "Cancel them")
    done(page)
    with site.store() as store:
        store.restore([first])
        store.reschedule([first], delay=timedelta(0))
        store.cancel([first])
    find(page, tag="customer-7", state="cancelled")
    listed(page, lambda ids: {first, second} == {*ids})
    says(page, "can be taken back until")
    site.take(page, "restorable")
    page.click(f"input[aria-label='Choose {first}']")
    page.click("[role=toolbar] button", text="Take back…")
    says(page, "1 message is overdue by now")
    page.click("dialog button", text="Take the overdue back too…")
    page.click("dialog footer button", text="Take it back")
    says(page, "1 message restored.")
    done(page)
    assert (site.state(first), site.state(second)) == ("due", "cancelled")
    # beside one message; its id may be on two lines, with nothing in the middle to click at
    page.wait_for("page.querySelectorAll('table.list tbody tr').length === 1")
    page.evaluate("page.querySelector('td.id a').click()")
    says(page, "The cancel can be taken back until")
    page.click("dialog .buttons button", text="Take the cancel back…")
    page.click("dialog footer button", text="Take it back")
    says(page, "1 message restored.")
    page.click("dialog footer button", text="Done")
    says(page, "Can be cancelled")
    page.press("Escape")
    page.wait_for("page.querySelector('dialog') === null")
    assert site.state(second) == "waiting"


def test_what_failed_is_looked_at_and_retried(site: Site) -> None:
    page = site.alone("op")
    page.wait_for("page.querySelector('.figures button') !== null")
    page.click(".figures button[aria-label^='Failed']")
    page.wait_for("[...page.querySelectorAll('#messages td.id a')].some(a => a.innerText === 'invoice-0')")
    page.click("td.id a", text="invoice-0")
    says(page, "closed-queue")
    page.click("dialog button", text="Show the body")
    says(page, '{\n  "reminder": "invoice-0"\n}')
    site.take(page, "message")
    assert axe.violations(page) == []
    # what can be done with it stands beside it, and the message is read again after that
    page.click("dialog .buttons button", text="Retry…")
    page.click("dialog footer button", text="Retry them")
    says(page, "1 message retried.")
    page.click("dialog footer button", text="Done")
    page.wait_for("page.querySelectorAll('dialog').length === 1")
    page.click("dialog .buttons button", text="Reschedule…")
    page.press("Escape")
    page.press("Escape")
    page.wait_for("page.querySelector('dialog') === null")
    assert site.state("invoice-0") in ("due", "waiting")


def test_messages_are_rescheduled_and_erased(site: Site) -> None:
    page = site.alone("op")
    find(page, tag="customer-8")
    name, other, *_ = listed(page, lambda ids: len(ids) > 2)
    page.click(f"input[aria-label='Choose {name}']")
    page.click("[role=toolbar] button", text="Reschedule…")
    page.evaluate("page.querySelector('dialog input[name=due_at]').value = '2031-05-06T07:08:09'")
    page.click("dialog button", text="Go on")
    page.click("dialog footer button", text="Reschedule them")
    says(page, "1 message rescheduled.")
    done(page)
    found = site.api("GET", "stores/delayed_store/message", params={"id": name})["message"]
    assert found["due_at"].startswith("2031-05-06T07:08:09")  # type: ignore[index]

    page.click(f"input[aria-label='Choose {other}']")
    act(page, "Erase…", "Erase them")
    says(page, "1 message erased.")
    done(page)
    assert other not in rows(page)


def test_the_dag_of_a_dispatcher_is_paused_and_let_run(site: Site) -> None:
    def paused() -> bool:
        return bool(site.world.live.call("GET", f"/dags/{demo_ui.DAG}")["is_paused"])

    # what the test before has retried fails again
    with suppress(DispatchFailed):
        site.dispatch("offer-none", dag_id=demo_ui.DAG)
    before = paused()
    page = site.alone("op")
    page.wait_for("page.querySelector('.card .figures') !== null")
    page.click("details summary", text="Dispatchers")
    of_dag = f"[data-key='pause {demo_ui.DAG}']"
    for wanted in (not before, before):
        page.click(of_dag, text="Pause" if wanted else "Unpause")
        button = "Unpause" if wanted else "Pause"
        page.wait_for(f"page.querySelector({of_dag!r})?.innerText === '{button}'")
        process.wait_for("the DAG", lambda wanted=wanted: paused() is wanted, seconds=120)
    page.click("details summary", text="Audit")
    says(page, "reschedule")
    site.take(page, "details")
