"""The page without a mouse."""

from __future__ import annotations

import pytest
from support.browsed_page import Site, keyboard, listed, reach, says

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]


def test_it_is_used_by_keyboard(site: Site) -> None:
    page = site.open("op")
    page.wait_for("page.querySelector('#messages td.id a') !== null")
    focus = "(page.activeElement.getAttribute('aria-label') || page.activeElement.innerText)"
    with keyboard(page) as press:
        # find
        press("/")
        assert page.evaluate(focus) == "Search by id, tag, destination or DAG"
        page.evaluate("page.querySelector('#skip').focus() || true")
        reach(page, press, "Search by id, tag, destination or DAG", most=5)
        page.write("invoice-1")
        page.wait_for("page.querySelector('.suggestions button') !== null")
        press("ArrowDown")
        press("Enter")
        listed(page, lambda ids: ids == ["invoice-1"])
        # read
        reach(page, press, "invoice-1")
        press("Enter")
        says(page, "History")
        # retry, cancel, and take the cancel back: it was due long ago, so that is asked
        for action, more, confirm, result, state in (
            ("Retry…", None, "Retry them", "retried", "due"),
            ("Cancel…", None, "Cancel them", "cancelled", "cancelled"),
            ("Take the cancel back…", "Take the overdue back too…", "Take it back", "restored", "due"),
            ("Cancel…", None, "Cancel them", "cancelled", "cancelled"),
        ):
            reach(page, press, action)
            press("Enter")
            if more is not None:
                says(page, "1 message is overdue by now, and would be dispatched at once.")
                reach(page, press, more)
                press("Enter")
            says(page, "1 message matches.")
            reach(page, press, confirm)
            press("Enter")
            says(page, f"1 message {result}.")
            reach(page, press, "Done")
            press("Enter")
            page.wait_for(f"[...page.querySelectorAll('dialog .badge')].some(b => b.innerText === '{state}')")
        press("Escape")
        page.wait_for("page.querySelector('dialog') === null")
        # one is where one was
        assert page.evaluate("page.activeElement.innerText") == "invoice-1"
