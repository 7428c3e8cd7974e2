"""The page without a mouse."""

from __future__ import annotations

import pytest
from support.browsed_page import Site, keyboard, listed, says

pytestmark = pytest.mark.timeout(900)


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
        # retry, cancel, and take the cancel back: it was due long ago, so that is asked
        for action, more, confirm, state in (
            ("Retry…", None, "Retry them", "due"),
            ("Cancel…", None, "Cancel them", "cancelled"),
            ("Take the cancel back…", "Take the overdue back too…", "Take it back", "due"),
            ("Cancel…", None, "Cancel them", "cancelled"),
        ):
            reach(action)
            press("Enter")
            if more is not None:
                says(page, "1 message is overdue by now, and would be dispatched at once.")
                reach(more)
                press("Enter")
            says(page, "1 message matches.")
            reach(confirm)
            press("Enter")
            says(page, "1 message changed.")
            reach("Done")
            press("Enter")
            page.wait_for(f"[...page.querySelectorAll('dialog .badge')].some(b => b.innerText === '{state}')")
        press("Escape")
        page.wait_for("page.querySelector('dialog') === null")
        # one is where one was
        assert page.evaluate("page.activeElement.innerText") == "invoice-1"
