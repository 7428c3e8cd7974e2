"""Pause and unpause from the page."""

from __future__ import annotations

import demo_ui
import pytest
from support import axe
from support.browsed_page import Site, find, keyboard, listed, reach, says

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
_PAUSED = "page.querySelector('#verdict [data-code=paused]')"


def test_a_tag_is_paused_and_unpaused_by_keyboard(site: Site) -> None:
    page = site.alone("op")
    with keyboard(page) as press:
        press("/")
        page.write("customer-7")
        page.wait_for("page.querySelector('.suggestions button') !== null")
        press("ArrowDown")
        press("Enter")
        says(page, "tag: customer-7")
        listed(page, lambda ids: len(ids) >= 5)
        reach(page, press, "Pause…")
        press("Enter")
        says(page, "No dispatcher takes messages of tag customer-7 until the pause ends.")
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
        # it stands in the verdict, with its end
        page.wait_for(f"{_PAUSED} !== null")
        shown = page.evaluate(f"{_PAUSED}.textContent")
        assert "tag 'customer-7': they are paused since" in shown
        assert "What fell due meanwhile is then sent within 600 s".lower() in shown.lower()
        [paused] = site.api("GET", "stores/delayed_store/pauses")["pauses"]
        assert paused["selection"] == {"tag": "customer-7"}
        page.evaluate("page.querySelectorAll('#verdict details.others').forEach(others => { others.open = true })")
        page.evaluate(
            f"[...{_PAUSED}.querySelectorAll('button')].find(b => b.innerText === 'Unpause…').focus() || true"
        )
        press("Enter")
        says(page, "Would unpause tag 'customer-7': ")
        assert axe.violations(page) == []
        site.take(page, "unpause")
        reach(page, press, "Unpause")
        press("Enter")
        says(page, "Unpaused tag 'customer-7': ")
        reach(page, press, "Done")
        press("Enter")
    site.api(
        "POST",
        "stores/delayed_store/unpause",
        json={"selection": paused["selection"], "on_unpause": "at_once", "dry_run": False},
    )
    page.evaluate("page.querySelector('#refresh').click()")
    page.wait_for(f"{_PAUSED} === null")


def test_what_else_is_paused_and_a_run_is_cancelled(site: Site) -> None:
    page = site.alone("op")
    # of a message all that it belongs to
    find(page, dag_id=demo_ui.DAG, run_id=site.run)
    listed(page, bool)
    page.click("td.id a")
    says(page, "History")
    page.click("dialog [data-key='message pause']")
    says(page, "No dispatcher takes messages of")
    choices = "[...page.querySelectorAll('label.choice')].map(label => label.innerText.trim())"
    names = [text.split(" ")[0] for text in page.evaluate(choices)]
    assert names == ["DAG", "DAG", "tag", "destination", "connection"]
    for _ in range(2):
        page.press("Escape")
    # a connection from the store's card
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


def test_who_may_edit_a_dag_pauses_what_it_stores(site: Site) -> None:
    page = site.alone("user")
    find(page, tag="customer-7")
    listed(page, bool)
    assert page.evaluate("page.querySelectorAll('[data-key=pause], .destinations button').length") == 0
    find(page, dag_id=demo_ui.DAG)
    listed(page, bool)
    page.click("[data-key=pause]")
    page.click("dialog footer button", text="Go on")
    says(page, "of the store would wait")
    page.click("dialog footer button", text="Pause")
    says(page, "Each dispatcher obeys within 2 s.")
    page.click("dialog footer button", text="Done")
    asked = {"selection": {"dag_id": demo_ui.DAG}, "on_unpause": "at_once", "dry_run": False}
    assert site.api("POST", "stores/delayed_store/unpause", user="user", json=asked)["ended"]
