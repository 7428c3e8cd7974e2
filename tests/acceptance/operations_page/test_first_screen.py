"""What an operator sees first."""

from __future__ import annotations

import json

import demo_ui
import pytest
from support import axe
from support.browsed_page import FRAME, Site, figure, listed, says

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]


def test_an_operator_sees_what_waits_is_late_and_is_stuck(site: Site) -> None:
    page = site.open("op", "/")
    page.frame = None
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
    assert axe.violations(page) == []
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
