"""The operations page in the real UI of a live Airflow with the data of `make demo-ui`, in a headless browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from urllib.parse import quote, urlsplit

import demo_ui
import httpx
import psutil
import pytest
from support import axe

from acceptance.conftest import Site as Browser
from acceptance.conftest import World
from airflow_delayed.delivery import delivery_for
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import DelayedMessage
from airflow_delayed.store.dispatch.report import DispatchFailed
from services import chromium, process

pytestmark = pytest.mark.timeout(900)
#: Where Airflow shows the page.
FRAME = "iframe[title^='Delayed']"


class Site:
    """The demo with its data, and a browser for it."""

    def __init__(self, world: World, demo: demo_ui.Demo, run: str, browser: Browser, pictures: Path) -> None:
        self.world = world
        self.demo = demo
        self.url = world.live.url
        self.run = run
        self.pictures = pictures
        self._browser = browser

    def open(self, user: str, path: str = demo_ui.PAGE) -> chromium.Page:
        """Open a page of Airflow as a user, and look into the frame there.

        To log another user in takes seconds, so the tests of one user follow each other.
        """
        page = self._browser.open(user, path)
        page.frame = FRAME
        if path != "/":
            # what stands above the list moves it down when it comes
            page.wait_for("page.querySelector('#verdict')?.getAttribute('aria-busy') === 'false'")
        return page

    def take(self, page: chromium.Page, name: str) -> None:
        """Keep what is seen, to be looked at."""
        page.screenshot(self.pictures / f"{name}.png")

    def api(self, method: str, path: str, user: str = "op", **options: object) -> dict[str, object]:
        """Ask the page's API."""
        with self.world.live.client(user) as http:
            answer = http.request(method, f"/delayed-deliveries/api/v1/{path}", **options)  # type: ignore[arg-type]
        assert answer.is_success, answer.text
        return answer.json()

    def state(self, message_id: str) -> str:
        """How a message stands, or what became of it."""
        found = self.api("GET", "stores/delayed_store/message", params={"id": message_id})
        return str((found["message"] or found["remembered"])["state"])  # type: ignore[index]

    def dispatch(self, *ids: str, dag_id: str | None = None) -> int:
        """Have messages dispatched now, and return how many were.

        :param dag_id: the DAG that the dispatcher says it runs in.
        """
        with self.store() as store, closing(delivery_for("delayed_sqs")) as transport:
            store.reschedule(ids, delay=timedelta(0))
            dispatcher = store.dispatcher(
                ["delayed_sqs"], lambda conn_id, clock: transport, lookahead=timedelta(0), dag_id=dag_id
            )
            return dispatcher.run().dispatched

    @contextmanager
    def store(self) -> Iterator[DelayedStoreHook]:
        """The store, by the connections of the live Airflow."""
        with pytest.MonkeyPatch.context() as monkeypatch:
            for name, fields in self.world.connections.items():
                monkeypatch.setenv(f"AIRFLOW_CONN_{name.upper()}", json.dumps(fields))
            with closing(DelayedStoreHook("delayed_store", "delayed_sqs")) as store:
                yield store


@pytest.fixture(scope="module")
def site(world: World, airflow_ui: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    pictures = tmp_path_factory.mktemp("pictures")
    broker = urlsplit(world.broker.url)._replace(path="/" + quote(world.broker.name, safe="")).geturl()
    demo = demo_ui.Demo(world.live, world.reminders.parent, broker)
    run = demo_ui.fill(demo)
    yield Site(world, demo, run, airflow_ui, pictures)
    # other tests count what the store holds
    world.empty_store()
    if wanted := os.environ.get("SCREENSHOTS"):
        Path(wanted).mkdir(parents=True, exist_ok=True)
        for picture in pictures.glob("*.png"):
            shutil.copy(picture, wanted)


def says(page: chromium.Page, text: str) -> None:
    """Wait until the page says it."""
    page.wait_for(f"page.body.innerText.includes({json.dumps(text)})")


def rows(page: chromium.Page) -> list[str]:
    """The ids of the messages that are listed."""
    return list(page.evaluate("[...page.querySelectorAll('#messages tbody td.id a')].map(b => b.innerText)"))


def listed(page: chromium.Page, wanted: Callable[[list[str]], bool]) -> list[str]:
    """Wait until the list is one that is wanted."""
    page.wait_for(
        "page.querySelector('#messages') && page.querySelector('#messages').getAttribute('aria-busy') === 'false'"
    )
    found = rows(page)
    assert wanted(found), found
    return found


def find(page: chromium.Page, **fields: str) -> None:
    """Fill in the form with all criteria, and find."""
    page.wait_for("page.querySelector('form.filter') !== null")
    page.evaluate("page.querySelector('details.more').open = true")
    page.evaluate("page.querySelectorAll('form.filter [name]').forEach(field => { field.value = '' })")
    for name, value in fields.items():
        page.evaluate(f"page.querySelector('form.filter [name={name}]').value = {json.dumps(value)}")
    page.click("form.filter button", text="Find")


def look_up(page: chromium.Page, text: str, suggestion: str) -> None:
    """Type into the search field, and take a suggestion."""
    page.fill("input[type=search]", text)
    page.click(".suggestions button", text=suggestion)


def figure(page: chromium.Page, name: str) -> str:
    """What a figure of the store says."""
    script = f"[...page.querySelectorAll('.figures > div')].find(d => d.innerText.startsWith({json.dumps(name)}))"
    for tries_left in reversed(range(4)):
        try:
            page.wait_for(f"{script} !== undefined", seconds=20)
            break
        except TimeoutError:
            # the page gives a connection five seconds, which a machine with much else to do may not have
            if not tries_left:
                raise
            page.click("#refresh")
    return str(page.evaluate(f"{script}.querySelector('dd').firstChild.textContent"))


def act(page: chromium.Page, action: str, confirm: str) -> None:
    """Do something with what is chosen, and wait for what the page says of it."""
    page.click("[role=toolbar] button", text=action)
    page.click("dialog footer button", text=confirm)
    page.wait_for("page.querySelector('dialog .notice') !== null")


def done(page: chromium.Page) -> None:
    page.click("dialog footer button", text="Done")
    page.wait_for("page.querySelector('dialog') === null")
    page.wait_for("page.querySelector('#messages').getAttribute('aria-busy') === 'false'")


def test_an_operator_sees_what_waits_is_late_and_is_stuck(site: Site) -> None:
    page = site.open("op", "/")
    page.frame = None
    # Airflow's home says it already
    says(page, "Delayed deliveries: Not delivering")
    site.take(page, "home")
    # from Airflow's own navigation
    page.click("a[href*='delayed-deliveries'], button[aria-label*='Delayed']")
    page.frame = FRAME
    assert figure(page, "Failed") == "4"
    # failed messages are grouped by cause
    page.click("[data-key='state Failed']")
    says(page, "Retry 4…")
    page.click(".groups button", text="Show")
    listed(page, lambda ids: len(ids) == 4)
    page.click("button[aria-label^='Remove reason']")
    page.click("button[aria-label^='Remove state']")
    page.click("button[aria-label^='Remove destination']")
    says(page, "messages")
    assert figure(page, "Expired") == "3"
    assert figure(page, "Overdue") == "5"
    assert figure(page, "Unroutable") == "2"
    # the first screen says whether messages are delivered, and why not
    says(page, "Not delivering")
    page.click("#verdict details.others > summary")
    says(page, "3 dead letters: messages that their consumer received again and again, and never deleted")
    assert page.evaluate("page.querySelector('#verdict [data-code]').getBoundingClientRect().top") < 300
    # a store that is down says so in its own card, without its password, and holds up nobody
    page.wait_for("page.querySelector('[data-connection=down_store] [role=alert]') !== null")
    assert "s3cret-word" not in page.text()
    site.take(page, "light-1280")

    # Airflow's theme is the page's, at once
    page.evaluate("localStorage.setItem('theme', 'dark')")
    page.evaluate("document.documentElement.classList.replace('light', 'dark') || true")
    page.wait_for("page.documentElement.dataset.theme === 'dark'")
    site.take(page, "dark-1280")
    page.evaluate("document.documentElement.classList.replace('dark', 'light') || true")
    page.evaluate("localStorage.setItem('theme', 'light')")
    # Airflow's address names what is shown: a reload shows it again, and Back leads to the view before
    page.click("[data-key='state Expired']")
    expired = listed(page, lambda ids: len(ids) == 3)
    page.wait_for("location.search.includes('state=expired')")
    page.click("[data-key='state Waiting']")
    listed(page, lambda ids: len(ids) == 50)
    page.evaluate("history.back() || true")
    page.wait_for("location.search.includes('state=expired')")
    page.evaluate("location.reload() || true")
    page.wait_for("page.querySelector('#messages')?.getAttribute('aria-busy') === 'false'")
    listed(page, lambda ids: ids == expired)
    assert axe.violations(page) == []
    # its own size, and a smaller one: nothing is wider than the page
    for width in (1280, 768):
        page.resize(width, 1400)
        page.wait_for("page.documentElement.scrollWidth <= page.documentElement.clientWidth")
    site.take(page, "light-768")
    # what cannot be reached is an error of its request, and the only one; but a machine with much else to do may not
    # answer in the page's five seconds, which is a 504
    expected = ("down_store", "(Gateway Timeout)")
    assert [problem for problem in page.problems if not any(word in problem for word in expected)] == []


def test_the_time_zone_is_the_one_chosen_in_airflow(site: Site) -> None:
    page = site.open("op")
    page.click("details.more summary")
    says(page, "Due from (UTC)")
    page.evaluate("localStorage.setItem('timezone', JSON.stringify('Asia/Tokyo'))")
    page.go(f"{site.url}{demo_ui.PAGE}")
    page.wait_for("page.querySelector('#verdict')?.getAttribute('aria-busy') === 'false'")
    page.click("details.more summary")
    says(page, "Due from (Asia/Tokyo)")
    # the field's times by that zone, also when its clocks are changed
    page.frame = None
    page.go(f"{site.url}/delayed-deliveries/")
    read = (
        "(await import(document.querySelector('script[src$=\"app.js\"]').src.replace('app.js', 'time.js'))).fromField"
    )
    for zone, said, meant in (
        ("Asia/Tokyo", "2026-01-02T03:04:05", "2026-01-01T18:04:05.000Z"),
        ("America/New_York", "2026-03-08T02:30:00", "2026-03-08T07:30:00.000Z"),  # skipped
        ("America/New_York", "2026-11-01T01:30:00", "2026-11-01T05:30:00.000Z"),  # twice
        ("Europe/Berlin", "2026-10-25T02:30:00", "2026-10-25T00:30:00.000Z"),  # twice
    ):
        page.evaluate(f"localStorage.setItem('timezone', JSON.stringify({json.dumps(zone)}))")
        assert page.evaluate(f"{read}({json.dumps(said)})") == meant
    page.evaluate("localStorage.removeItem('timezone')")


def test_all_of_one_customer_is_cancelled_and_both_logs_say_by_whom(site: Site) -> None:
    page = site.open("op")
    look_up(page, "invoice-0", "id invoice-0")
    listed(page, lambda ids: ids == ["invoice-0"])
    page.click("button[aria-label='Remove id invoice-0']")
    look_up(page, "customer-5", "tag customer-5")
    found = listed(page, lambda ids: len(ids) > 5)
    says(page, f"{len(found)} messages")
    page.click("input[aria-label='Choose all on this page']")
    act(page, "Cancel…", "Cancel them")
    says(page, f"{len(found)} messages changed.")
    site.take(page, "cancelled")
    done(page)
    listed(page, lambda ids: ids == [])
    assert {site.state(name) for name in found} == {"cancelled"}

    audit = site.world.live.run("airflow", "delayed", "audit", "--conn-id", "delayed_store")
    assert "op" in audit
    assert "cancel" in audit
    with site.world.live.client() as http:
        events = http.get("/api/v2/eventLogs", params={"order_by": "-when", "limit": 50}).json()["event_logs"]
    assert any(event["owner"] == "op" and "cancel" in event["event"] for event in events), events


def test_a_cancel_is_taken_back(site: Site) -> None:
    page = site.open("op")
    find(page, tag="customer-7", state="waiting")
    first, second, *_ = listed(page, lambda ids: len(ids) > 2)
    page.wait_for("page.querySelector('#messages tbody').innerText.includes('can be cancelled until')")
    for name in (first, second):
        page.click(f"input[aria-label='Choose {name}']")
    act(page, "Cancel…", "Cancel them")
    # where the result stands
    page.click("dialog button", text="Take it back…")
    says(page, "2 messages match.")
    page.click("dialog footer button", text="Take it back")
    says(page, "2 messages changed.")
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
    says(page, "1 message changed.")
    done(page)
    assert (site.state(first), site.state(second)) == ("due", "cancelled")
    # beside one message; its id may be on two lines, with nothing in the middle to click at
    page.wait_for("page.querySelectorAll('#messages tbody tr').length === 1")
    page.evaluate("page.querySelector('td.id a').click()")
    says(page, "The cancel can be taken back until")
    page.click("dialog .buttons button", text="Take the cancel back…")
    page.click("dialog footer button", text="Take it back")
    says(page, "1 message changed.")
    page.click("dialog footer button", text="Done")
    says(page, "Can be cancelled")
    page.press("Escape")
    page.wait_for("page.querySelector('dialog') === null")
    assert site.state(second) == "waiting"


def test_a_dispatcher_that_is_quicker_wins(site: Site) -> None:
    page = site.open("op")
    find(page, tag="customer-6")
    first, second, *_ = listed(page, lambda ids: len(ids) > 2)
    for name in (first, second):
        page.click(f"input[aria-label='Choose {name}']")
    page.click("[role=toolbar] button", text="Cancel…")
    page.wait_for("page.querySelector('dialog footer button.primary') !== null")
    # between the question and the answer
    assert site.dispatch(first) >= 1
    page.click("dialog footer button", text="Cancel them")
    says(page, "1 message changed, 1 not.")
    says(page, "dispatched")
    site.take(page, "too-late")
    assert (site.state(first), site.state(second)) == ("dispatched", "cancelled")
    done(page)
    # where it went, and how late, is found by its id
    find(page, id=first)
    listed(page, lambda ids: ids == [first])
    page.click("td.id a", text=first)
    says(page, "History")
    says(page, "dispatched")


def test_what_failed_is_looked_at_and_retried(site: Site) -> None:
    page = site.open("op")
    page.wait_for("page.querySelector('.figures button') !== null")
    page.click(".figures button[aria-label^='Failed']")
    page.wait_for("page.querySelectorAll('#messages tbody tr').length === 4")
    page.click("td.id a", text="invoice-0")
    says(page, "closed-queue")
    page.click("dialog button", text="Show the body")
    says(page, '{"reminder": "invoice-0"}')
    site.take(page, "message")
    # what can be done with it stands beside it, and the message is read again after that
    page.click("dialog .buttons button", text="Retry…")
    page.click("dialog footer button", text="Retry them")
    says(page, "1 message changed.")
    page.click("dialog footer button", text="Done")
    page.wait_for("page.querySelectorAll('dialog').length === 1")
    page.click("dialog .buttons button", text="Reschedule…")
    page.press("Escape")
    page.press("Escape")
    page.wait_for("page.querySelector('dialog') === null")
    assert site.state("invoice-0") in ("due", "waiting")


def test_messages_are_rescheduled_and_erased(site: Site) -> None:
    page = site.open("op")
    find(page, tag="customer-8")
    name, other, *_ = listed(page, lambda ids: len(ids) > 2)
    page.click(f"input[aria-label='Choose {name}']")
    page.click("[role=toolbar] button", text="Reschedule…")
    page.evaluate("page.querySelector('dialog input[name=due_at]').value = '2031-05-06T07:08:09'")
    page.click("dialog button", text="Go on")
    page.click("dialog footer button", text="Reschedule them")
    says(page, "1 message changed.")
    done(page)
    found = site.api("GET", "stores/delayed_store/message", params={"id": name})["message"]
    assert found["due_at"].startswith("2031-05-06T07:08:09")  # type: ignore[index]

    page.click(f"input[aria-label='Choose {other}']")
    act(page, "Erase…", "Erase them")
    says(page, "1 message changed.")
    done(page)
    assert other not in rows(page)


def test_the_dag_of_a_dispatcher_is_paused_and_let_run(site: Site) -> None:
    def paused() -> bool:
        return bool(site.world.live.call("GET", f"/dags/{demo_ui.DAG}")["is_paused"])

    # what the test before has retried fails again
    with suppress(DispatchFailed):
        site.dispatch("offer-none", dag_id=demo_ui.DAG)
    before = paused()
    page = site.open("op")
    page.wait_for("page.querySelector('.card .figures') !== null")
    page.click("details summary", text="Dispatchers")
    for wanted in (not before, before):
        page.click("button", text="Pause" if wanted else "Let it run")
        button = "Let it run" if wanted else "Pause"
        page.wait_for(f"[...page.querySelectorAll('[data-key^=pause]')].some(b => b.innerText === '{button}')")
        process.wait_for("the DAG", lambda wanted=wanted: paused() is wanted, seconds=30)
    page.click("details summary", text="Audit")
    says(page, "reschedule")
    page.click("details summary", text="Verify")
    says(page, "An install would do nothing.")
    site.take(page, "details")


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


@contextmanager
def keyboard(page: chromium.Page) -> Iterator[Callable[[str], None]]:
    """Press keys, with the focus in the frame."""
    page.evaluate("page.defaultView.focus() || page.querySelector('#refresh').focus() || true")
    yield page.press


def test_it_is_used_by_keyboard(site: Site) -> None:
    page = site.open("op")
    page.wait_for("page.querySelector('#messages td.id a') !== null")
    focus = "(page.activeElement.getAttribute('aria-label') || page.activeElement.innerText)"
    with keyboard(page) as press:

        def reach(name: str) -> None:
            seen = []
            while name not in seen[-1:]:
                assert len(seen) < 60, seen
                press("Tab")
                seen.append(page.evaluate(focus))

        # find
        reach("Search by id, tag, destination or DAG")
        page.write("invoice-1")
        page.wait_for("page.querySelector('.suggestions button') !== null")
        press("ArrowDown")
        press("Enter")
        listed(page, lambda ids: ids == ["invoice-1"])
        # read
        reach("invoice-1")
        press("Enter")
        says(page, "History")
        # retry and cancel
        for action, confirm, after in (("Retry…", "Retry them", "Reschedule…"), ("Cancel…", "Cancel them", None)):
            reach(action)
            press("Enter")
            says(page, "1 message matches.")
            reach(confirm)
            press("Enter")
            says(page, "1 message changed.")
            reach("Done")
            press("Enter")
            if after is not None:
                page.wait_for(f"[...page.querySelectorAll('dialog button')].some(b => b.innerText === '{after}')")
        page.wait_for("[...page.querySelectorAll('dialog .badge')].some(b => b.innerText === 'cancelled')")
        press("Escape")
        page.wait_for("page.querySelector('dialog') === null")
        # one is where one was
        assert page.evaluate("page.activeElement.innerText") == "invoice-1"


def test_ten_thousand_messages_an_odd_id_and_a_wrong_clock(site: Site) -> None:
    now = datetime.now(timezone.utc)
    odd = "".join(map(chr, range(33, 127)))

    def message(name: str, number: int) -> DelayedMessage:
        return DelayedMessage(
            destination=f"place-{number % 2000}",
            body=b"{}",
            due_at=now + timedelta(days=30),
            message_id=name,
            tag="one of many",
        )

    with site.store() as store:
        store.send([message(odd, 0), *(message(f"many-{number}", number) for number in range(9_999))])
    page = site.open("op", "/")
    page.frame = None
    page.at_first(
        """const Right = Date; globalThis.Date = class extends Right {
        constructor(...given) { given.length ? super(...given) : super(Right.now() + 864e5); }
        static now() { return Right.now() + 864e5; } }"""
    )
    page.go(f"{site.url}/delayed-deliveries/")
    # the times are the server's
    page.wait_for("page.querySelector('#fresh').innerText.startsWith('Updated')")
    [shown] = re.findall(r"[-\d]+ [:\d]+", page.evaluate("page.querySelector('#fresh').innerText"))
    assert abs(datetime.fromisoformat(f"{shown}+00:00") - now) < timedelta(minutes=10)
    # an id with every printable character is found, opened, and has an address
    look_up(page, odd, f"id {odd}")
    listed(page, lambda ids: ids == [odd])
    page.click("td.id a")
    says(page, "History")
    page.go(str(page.evaluate("location.href")))
    says(page, "History")
    assert page.evaluate("page.querySelector('dialog dd').innerText") == odd
    page.press("Escape")
    # one of 2,000 destinations, then all 10,000 messages, changed by one answer
    find(page, destination="place-1999")
    listed(page, lambda ids: len(ids) == 4)
    find(page, tag="one of many")
    listed(page, lambda ids: len(ids) == 50)
    says(page, "tag: one of many")
    page.click("nav.pages button", text="Next")
    says(page, "Page 2")
    page.click("input[aria-label='Choose all on this page']")
    page.click("[role=toolbar] button", text="choose all that match")
    page.click("[role=toolbar] button", text="Cancel…")
    says(page, "10,000 messages match")
    page.click("dialog footer button", text="Cancel them")
    says(page, "10,000 messages changed.")
    done(page)
    assert site.state(odd) == "cancelled"


def test_a_viewer_reads_figures_and_acts_on_nothing(site: Site) -> None:
    page = site.open("viewer")
    assert figure(page, "Waiting") != ""
    find(page, id="offer-1")
    listed(page, lambda ids: ids == ["offer-1"])
    assert page.evaluate("page.querySelectorAll('#messages input[type=checkbox], [role=toolbar]').length") == 0
    page.click("td.id a", text="offer-1")
    says(page, "shown to those who may read the connection")
    assert "reminder" not in page.text().replace("appointment-reminders", "")
    site.take(page, "viewer")
    with site.world.live.client("viewer") as http:
        answer = http.post(
            "/delayed-deliveries/api/v1/stores/delayed_store/cancel", json={"ids": ["offer-1"], "dry_run": False}
        )
    assert answer.status_code == 403


def test_what_is_moved_back_and_what_stays_is_told(site: Site) -> None:
    page = site.open("admin")
    says(page, "Send unroutable messages again…")
    page.click("button", text="Send unroutable messages again…")
    says(page, "2 messages were unroutable. They name these destinations")
    # nothing goes where nobody has ticked it
    assert page.evaluate("page.querySelectorAll('dialog input[type=checkbox]:checked').length") == 0
    assert page.evaluate("page.querySelector('dialog button.primary').disabled")
    page.click("dialog input[type=checkbox]")
    assert not page.evaluate("page.querySelector('dialog button.primary').disabled")
    site.take(page, "redrive")
    page.click("dialog button", text="Leave them")
    assert figure(page, "Unroutable") == "2"
    page.click("button", text="Move dead letters back…")
    says(page, "Move 3 messages back")
    page.click("dialog button", text="Move them")
    page.wait_for("page.querySelector('dialog .notice') !== null")
    # the demo has put them there by hand
    says(page, "3 stay in the queue: came from another queue")


def test_who_starts_the_demo_reads_where_the_page_is_and_logs_in_by_what_is_printed(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    demo_ui.introduce(site.demo)
    shown = capsys.readouterr().out
    [url] = [word for word in shown.split() if word.startswith("http")]
    logins = dict(re.findall(r"login (\w+) +password (\S+)", shown))
    assert logins.keys() == {"admin", "op", "viewer"}
    for user, password in logins.items():
        with httpx.Client(base_url=url.removesuffix(demo_ui.PAGE), timeout=60) as http:
            answer = http.post("/auth/token", json={"username": user, "password": password})
        assert answer.is_success, answer.text


@pytest.mark.long
def test_the_demo_starts_by_itself_and_stops(here: Path, tmp_path: Path) -> None:
    program = [sys.executable, str(here / ".ci/demo_ui.py"), "--folder", str(tmp_path / "demo-ui")]
    demo = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    try:
        assert demo.stdout is not None
        shown = ""
        for line in demo.stdout:
            shown += line
            if "Ctrl-C" in line:
                break
        [url] = [word for word in shown.split() if word.startswith("http")]
        logins = dict(re.findall(r"login (\w+) +password (\S+)", shown))
        login = {"username": "op", "password": logins["op"]}
        base = url.removesuffix(demo_ui.PAGE)
        token = httpx.post(f"{base}/auth/token", json=login, timeout=60).raise_for_status().json()["access_token"]
        connections = f"{base}/delayed-deliveries/api/v1/connections"
        listed = httpx.get(connections, headers={"Authorization": f"Bearer {token}"}, timeout=60)
        assert "delayed_store" in listed.raise_for_status().text
        started = psutil.Process(demo.pid).children(recursive=True)
        demo.send_signal(signal.SIGINT)
        assert demo.wait(60) == 0
    finally:
        demo.kill()
        demo.wait()
        if demo.stdout is not None:
            demo.stdout.close()
    _, alive = psutil.wait_procs(started, timeout=5)
    assert [process.cmdline() for process in alive] == []


def test_the_timeline_shows_what_was_dispatched_and_what_falls_due(site: Site) -> None:
    page = site.open("op", "/")
    page.frame = None
    page.go(f"{site.url}/delayed-deliveries/?store=delayed_store")
    page.wait_for("page.querySelector('.timeline canvas') !== null")
    page.click(".timeline .spans button", text="24 h")
    said = "page.querySelector('.timeline [role=status]').innerText"
    page.wait_for(f"{said}.startsWith('In all: ') && {said}.includes('Due: appointment-reminders')")
    page.evaluate("page.querySelector('.timeline').scrollIntoView({ block: 'center' }) || true")
    for theme in ("light", "dark"):
        page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
        site.take(page, f"timeline-{theme}")
    # by keyboard alone: from bar to bar, and to the messages of one
    page.evaluate("page.querySelector('.timeline .bars').focus() || true")
    for _ in range(26):
        page.press("ArrowRight")
        if page.evaluate(f"{said}.includes('Due: ')"):
            break
    page.press("Enter")
    page.wait_for("new URLSearchParams(location.search).get('due_until') !== null")
    listed(page, bool)
    # what was dispatched is listed too, the last one first
    page.click("[data-key='state Dispatched']")
    page.wait_for("new URLSearchParams(location.search).get('state') === 'dispatched'")
    listed(page, bool)
    assert page.evaluate("page.querySelector('#messages tbody .badge').innerText") == "dispatched"
    # and for those who cannot see it
    page.click(".timeline details summary")
    assert page.evaluate("page.querySelectorAll('.timeline tbody tr').length") > 0
