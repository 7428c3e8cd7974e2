"""Pause and unpause from the page."""

from __future__ import annotations

import demo_ui
import pytest
from support import axe
from support.browsed_page import Site, find, keyboard, listed, reach, says

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
_PAUSED = "page.querySelector('#verdict [data-code=paused]')"


def test_a_destination_is_paused_and_unpaused_by_keyboard(site: Site) -> None:
    page = site.alone("op")
    find(page, tag="customer-7")
    listed(page, bool)
    page.click("td.id a")
    says(page, "History")
    page.click("dialog [data-key='message pause']")
    says(page, "Until somebody ends the pause, no dispatcher takes messages of")
    choices = "[...page.querySelectorAll('label.choice')].map(label => label.innerText.trim())"
    destination, connection = page.evaluate(choices)
    assert (destination.split(" ")[0], connection.split(" ")[0]) == ("destination", "connection")
    name = destination.removeprefix("destination ")
    with keyboard(page) as press:
        assert axe.violations(page) == []
        site.take(page, "pause")
        reach(page, press, "Go on")
        press("Enter")
        says(page, "of the store would wait, until ")
        reach(page, press, "Pause")
        press("Enter")
        says(page, "Each dispatcher obeys within 2 s.")
        reach(page, press, "Done")
        press("Enter")
        # it stands in the verdict
        page.wait_for(f"{_PAUSED} !== null")
        assert f"destination '{name}': they are paused since" in page.evaluate(f"{_PAUSED}.textContent")
        [paused] = site.api("GET", "stores/delayed_store/pauses")["pauses"]
        assert paused["selection"] == {"destination": name}
        page.evaluate("page.querySelectorAll('#verdict details.others').forEach(others => { others.open = true })")
        page.evaluate(
            f"[...{_PAUSED}.querySelectorAll('button')].find(b => b.innerText === 'Unpause…').focus() || true"
        )
        press("Enter")
        says(page, f"Would unpause destination '{name}': ")
        assert axe.violations(page) == []
        site.take(page, "unpause")
        reach(page, press, "Unpause")
        press("Enter")
        says(page, f"Unpaused destination '{name}': ")
        reach(page, press, "Done")
        press("Enter")
    page.wait_for(f"{_PAUSED} === null")


def test_a_connection_is_paused_from_its_card_and_a_run_is_cancelled(site: Site) -> None:
    page = site.alone("op")
    find(page, dag_id=demo_ui.DAG, run_id=site.run)
    listed(page, bool)
    page.click("[data-connection=delayed_store] summary", text="Pauses")
    says(page, "Nothing is paused.")
    page.click("[data-connection=delayed_store] button", text="Pause a connection…")
    says(page, "connection delayed_sqs")
    page.press("Escape")
    # a whole run; it can be taken back
    page.click("button", text="Cancel the run…")
    says(page, "They will not be delivered")
    page.click("dialog button", text="Cancel them")
    says(page, " cancelled.")
    page.click("dialog button", text="Take it back…")
    page.click("dialog button", text="Take it back")
    says(page, " restored.")
    page.click("dialog footer button", text="Done")
