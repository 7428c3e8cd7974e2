"""The chart of a store's past and future."""

from __future__ import annotations

import re

import pytest
from support.browsed_page import Site, listed

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]


def test_the_timeline_shows_what_was_dispatched_and_what_falls_due(site: Site) -> None:
    page = site.alone("op", "?store=delayed_store")
    page.wait_for("page.querySelector('.timeline g') !== null")
    page.click(".timeline .spans button", text="24 h")
    said = "page.querySelector('.timeline .legend').innerText"
    assert page.evaluate("page.querySelector('.timeline').getBoundingClientRect().height") <= 86
    pressed = "[...page.querySelectorAll('.timeline .spans button')].map(button => button.getAttribute('aria-pressed'))"
    assert page.evaluate(pressed) == ["false", "true"]
    page.wait_for(f"{said}.startsWith('In all at ') && {said}.includes('Due ')")
    page.evaluate("page.querySelector('.timeline').scrollIntoView({ block: 'center' }) || true")
    for theme in ("light", "dark"):
        page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
        site.take(page, f"timeline-{theme}")
    # each bar says from when until when it counts what
    titles = page.evaluate("[...page.querySelectorAll('.timeline g title')].map(title => title.textContent)")
    assert len(titles) == 49
    assert all(re.fullmatch(r"[-0-9]+ [0-9]+:00 to [0-9]+:00: (nothing|\w.* [0-9,.]+)", title) for title in titles), (
        titles
    )
    # by keyboard alone: from bar to bar, and to the messages of one
    page.evaluate("page.querySelector('.timeline .bars').focus() || true")
    for _ in range(26):
        page.press("ArrowRight")
        if page.evaluate(f"{said}.includes('Due ')"):
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
