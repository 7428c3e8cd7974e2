"""The page in Airflow's frame, and by itself: addresses, Back, links."""

from __future__ import annotations

from datetime import timedelta
from urllib.parse import urlencode

import demo_ui
import pytest
from support import axe
from support.browsed_page import Site, listed, look_up, says

from airflow_delayed.links import page_link
from airflow_delayed.message import DelayedMessage

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]


def test_a_run_and_a_task_show_what_they_sent(site: Site) -> None:
    for sender in ({}, {"run_id": site.run}, {"run_id": site.run, "task_id": "send"}):
        page = site.open("op", page_link("", store="delayed_store", dag_id=demo_ui.DAG, **sender))
        says(page, "Sent by")
        found = listed(page, bool)
        assert all(name.startswith("appointment-") for name in found), (sender, found)
        assert page.evaluate("page.querySelector('input[name=dag_id]').value") == demo_ui.DAG
    # a reload shows the same
    found = listed(page, bool)
    look_up(page, found[0], f"id {found[0]}")
    listed(page, lambda ids: ids == found[:1])
    page.evaluate("location.reload() || true")
    page.wait_for("page.querySelector('.chip') !== null")
    listed(page, lambda ids: ids == found[:1])
    # and back from a message to its task, without loading all of Airflow again
    page.evaluate("(window.same = true)")
    page.click("#messages tbody a", text="send")
    page.frame = None
    page.wait_for("location.pathname.endsWith('/tasks/send')")
    page.wait_for("document.querySelector('iframe') === null && window.same")


#: How many messages the first screen shows whole, and how high their rows are at most, in CSS pixels.
_SHOWN = """(() => {
  const rows = [...page.querySelectorAll('table.list tbody tr')].map(row => row.getBoundingClientRect());
  const seen = rows.filter(({ bottom }) => bottom <= page.defaultView.innerHeight);
  return [seen.length, Math.max(...rows.map(row => row.height))];
})()"""


def test_what_is_seen_is_in_the_address_and_back_leads_to_the_view_before(site: Site) -> None:
    page = site.alone("op", "?store=delayed_store&state=failed")
    failed = listed(page, lambda ids: len(ids) > 1)
    page.wait_for("page.querySelectorAll('#overview [aria-busy=true]').length === 0")
    # each state says what it means, where it stands and in the list of words
    page.click("#words summary")
    says(page, "Given up after all tries")
    for place in ("[data-key='state Failed']", "td .badge"):
        assert page.evaluate(f"page.querySelector(`{place}`).title").startswith("Given up after all tries")
    for theme in ("light", "dark"):
        page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
        assert (theme, axe.violations(page)) == (theme, [])
        for width in (1440, 1024, 390):
            page.resize(width, 844)
            page.evaluate("scrollTo(0, 0)")
            page.wait_for("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
            site.take(page, f"page-{theme}-{width}")
        page.resize(1280, 1400)
    # rows are of one line: twelve are on the first screen below three causes and the strip, on a phone four
    page.click("[data-key='state Waiting']")
    page.wait_for("page.querySelectorAll('table.list tbody tr').length === 50")
    assert page.evaluate("page.querySelectorAll('#verdict > .notice').length") == 3
    for width, height, least, highest in ((1440, 900, 12, 36), (390, 844, 4, 90)):
        page.resize(width, height)
        page.evaluate("scrollTo(0, 0)")
        page.wait_for("page.documentElement.scrollWidth <= page.documentElement.clientWidth")
        site.take(page, f"first-screen-{width}")
        shown, high = page.evaluate(_SHOWN)
        assert (shown >= least, high <= highest) == (True, True), (width, shown, high)
        assert axe.violations(page) == []
    page.resize(1280, 1400)
    page.evaluate("history.back() || true")
    listed(page, lambda ids: ids == failed)
    # why is in the row
    says(page, "closed-queue")
    page.click("td.id a", text=failed[0])
    page.wait_for("page.querySelector('dialog h3') !== null")
    assert page.evaluate("new URLSearchParams(location.search).get('message')") == failed[0]
    address = page.evaluate("location.href")
    page.evaluate("history.back() || true")
    page.wait_for("page.querySelector('dialog') === null && !location.search.includes('message=')")
    page.click("[data-key='state Expired']")
    page.wait_for("new URLSearchParams(location.search).get('state') === 'expired'")
    listed(page, lambda ids: ids and not set(ids) & set(failed))
    page.evaluate("history.back() || true")
    page.wait_for("new URLSearchParams(location.search).get('state') === 'failed'")
    listed(page, lambda ids: ids == failed)
    # a message has an address of its own
    page.go(address)
    page.wait_for("page.querySelector('dialog h3') !== null")
    says(page, failed[0])
    # what is chosen stays chosen when the list is read again
    page.press("Escape")
    page.click(f"input[aria-label='Choose {failed[1]}']")
    page.click("#refresh")
    page.wait_for("page.querySelector('#messages').getAttribute('aria-busy') === 'false'")
    says(page, "1 chosen")
    # a change that would change nothing has no button to do it
    page.click("[role=toolbar] button", text="Reschedule…")
    page.click("dialog button", text="Due now")
    says(page, "Nothing would change")
    says(page, failed[1])
    assert page.evaluate("page.querySelectorAll('dialog footer button').length") == 1


def test_wrong_input_in_the_address_costs_the_list_alone(site: Site) -> None:
    page = site.open("op", "/")
    page.frame = None
    for wrong, said in (
        ("due_from=garbage", "due_from must be a date and time with a zone"),
        ("state=nonsense", "state must be 'waiting'"),
        (f"id={300 * 'x'}", "id may have 250 characters at most"),
        ("due_from=2031-01-02T00:00:00Z&due_until=2031-01-01T00:00:00Z", "“Due from” is not before “Due before”"),
    ):
        page.go(f"{site.url}/delayed-deliveries/?store=delayed_store&{wrong}")
        says(page, said)
        # also at the next look
        page.wait_for("page.querySelector('.card .figures') !== null")
        page.click("#refresh")
        page.wait_for("page.querySelector('#fresh').innerText.startsWith('Updated')")
        assert page.evaluate("page.querySelector('#verdict [data-code]') !== null")
        assert page.evaluate("[...page.querySelectorAll('#messages [role=alert]')].length") == 1
    # the field is removed, and there is a list
    page.click("button[aria-label^='Remove due from']")
    page.click("button[aria-label^='Remove due before']")
    listed(page, bool)


def test_odd_texts_are_shortened_and_turn_nothing(site: Site) -> None:
    tag = "\u202etnadecca"
    with site.store() as store:
        due = store.now() + timedelta(days=20)
        long = {"destination": 18 * "long-place-", "message_id": 12 * "long-name-"}
        store.send([DelayedMessage(**long, body=b"x", due_at=due, headers={}, tag=tag)])
    page = site.open("op", "/")
    page.frame = None
    page.go(f"{site.url}/delayed-deliveries/?{urlencode({'store': 'delayed_store', 'tag': tag})}")
    [name] = listed(page, lambda ids: len(ids) == 1)
    assert name == long["message_id"]
    says(page, r"tag: \u202etnadecca")
    for width in (1440, 390):
        page.resize(width, 900)
        page.wait_for("page.documentElement.scrollWidth <= page.documentElement.clientWidth")
        site.take(page, f"odd-{width}")
        assert page.evaluate("page.querySelector('td.id').title") == name
    page.resize(1280, 1400)
    with site.store() as store:
        store.cancel([name])
    # what is late is sorted within its page
    page.go(f"{site.url}/delayed-deliveries/?store=delayed_store&state=due&state=retrying")
    listed(page, lambda ids: len(ids) > 1)
    # the first answer draws the list again, whoever aims at it
    page.wait_for("page.getElementById('fresh').textContent.startsWith('Updated')")
    page.click("[data-key=sort]")
    page.wait_for("page.querySelector('th.late').getAttribute('aria-sort') === 'descending'")
