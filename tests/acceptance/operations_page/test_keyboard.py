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
