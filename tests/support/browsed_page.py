"""The operations page in a browser, as a user looks at it: in Airflow's frame, or by itself."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path

import demo_ui
import pytest
from acceptance.conftest import Site as Browser
from acceptance.conftest import World

from airflow_delayed.delivery import delivery_for
from airflow_delayed.hooks.store import DelayedStoreHook
from services import chromium

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

    def alone(self, user: str, query: str = "") -> chromium.Page:
        """Open the page by itself, without all of Airflow around it, which takes twice the CPU."""
        page = self._browser.open(user, f"/delayed-deliveries/{query}")
        page.wait_for("page.querySelector('#verdict')?.getAttribute('aria-busy') === 'false'")
        return page

    def log_in(self, page: chromium.Page, user: str) -> None:
        """Log in where Airflow asks for it."""
        self._browser.log_in(page, user)

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


def says(page: chromium.Page, text: str) -> None:
    """Wait until the page says it."""
    page.wait_for(f"page.body.innerText.includes({json.dumps(text)})")


def rows(page: chromium.Page) -> list[str]:
    """The ids of the messages that are listed."""
    return list(page.evaluate("[...page.querySelectorAll('#messages tbody td.id a')].map(b => b.innerText)"))


def listed(page: chromium.Page, wanted: Callable[[list[str]], bool]) -> list[str]:
    """Wait until the list is complete, and is the wanted one."""
    deadline = time.monotonic() + chromium.PATIENCE
    while True:
        page.wait_for("page.querySelector('#messages')?.getAttribute('aria-busy') === 'false'")
        found = rows(page)
        if wanted(found):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def find(page: chromium.Page, **fields: str) -> None:
    """Fill in the form with all criteria, and find."""
    page.wait_for("page.querySelector('form.filter') !== null")
    page.evaluate("page.querySelector('details.more').open = true")
    page.evaluate("page.querySelectorAll('form.filter [name]').forEach(field => { field.value = '' })")
    for name, value in fields.items():
        page.evaluate(f"page.querySelector('form.filter [name={name}]').value = {json.dumps(value)}")
    page.evaluate("page.querySelector('form.filter').dataset.before = ''")
    # a search draws the form anew; the page may move just under the pointer, and then one clicks again
    while page.evaluate("page.querySelector('form.filter').dataset.before === ''"):
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


@contextmanager
def keyboard(page: chromium.Page) -> Iterator[Callable[[str], None]]:
    """Press keys, with the focus in the frame."""
    page.evaluate("page.defaultView.focus() || page.querySelector('#refresh').focus() || true")
    yield page.press


def reach(page: chromium.Page, press: Callable[[str], None], name: str, most: int = 60) -> None:
    """Press Tab until what has the focus has this name."""
    focus = "(page.activeElement.getAttribute('aria-label') || page.activeElement.innerText)"
    seen: list[str] = []
    while name not in seen[-1:]:
        assert len(seen) < most, seen
        press("Tab")
        seen.append(page.evaluate(focus))


def answers(page: chromium.Page, script: str) -> None:
    """Have a script answer the page's requests from now on, and have it ask."""
    page.evaluate(
        "(window => { const real = window.real ??= window.fetch, { Response } = window;"
        f" window.fetch = async (address, options) => {{ {script} }}; return true; }})(page.defaultView)"
    )
    page.evaluate("page.querySelector('#refresh').click()")
