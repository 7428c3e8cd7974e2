"""The page in Airflow's frame and tabs, and by itself: addresses, Back, links."""

from __future__ import annotations

from urllib.parse import quote

import demo_ui
import pytest
from support import axe
from support.browsed_page import Site, listed, look_up, says

pytestmark = pytest.mark.timeout(900)


def test_a_run_and_a_task_show_what_they_sent(site: Site) -> None:
    run = quote(site.run, safe="")
    for path in (
        f"/dags/{demo_ui.DAG}/plugin/delayed-deliveries-dag",
        f"/dags/{demo_ui.DAG}/runs/{run}/plugin/delayed-deliveries-dag-run",
        f"/dags/{demo_ui.DAG}/runs/{run}/tasks/send/plugin/delayed-deliveries-task-instance",
    ):
        page = site.open("op", path)
        says(page, "Sent by")
        found = listed(page, bool)
        assert all(name.startswith("appointment-") for name in found), (path, found)
        assert page.evaluate("page.querySelector('input[name=dag_id]').value") == demo_ui.DAG
    # a tab shows after a reload what it showed before
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


#: Where the first message of the list ends, in CSS pixels, below a verdict that has no cause to show.
_FIRST_ROW_WHEN_WELL = """(() => {
  const verdict = page.querySelector('#verdict');
  const causes = [...verdict.childNodes];
  verdict.innerHTML = '<p class="notice good">All is well. The next message is due in 2 min, at 2031-05-06 07:08.</p>';
  const end = page.querySelector('#messages tbody tr').getBoundingClientRect().bottom;
  verdict.replaceChildren(...causes);
  return end;
})()"""


def test_what_is_seen_is_in_the_address_and_back_leads_to_the_view_before(site: Site) -> None:
    page = site.open("op", "/")
    page.frame = None
    page.go(f"{site.url}/delayed-deliveries/?store=delayed_store&state=failed")
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
        # on a phone the first message is on the first screen, if all is well
        assert page.evaluate(_FIRST_ROW_WHEN_WELL) < 844
        page.resize(1280, 1400)
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
