"""Changes of many messages on the page, step by step while the question is open."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from support import axe
from support.browsed_page import Site, done, listed, says

from airflow_delayed.message import DelayedMessage

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
#: More than two steps of 10,000 messages.
MANY = 25_000
#: The second step waits until the test lets it go on.
_HELD = """const real = globalThis.fetch; globalThis.fetch = async (address, options) => {
    const asked = options?.body ?? '';
    if (asked.includes('"after":"')) await new Promise((resolve) => { globalThis.goOn = resolve; });
    return real(address, options); }"""


def ask(page, action: str) -> None:
    listed(page, lambda ids: len(ids) == 50)
    page.click("input[aria-label='Choose all on this page']")
    page.click("[role=toolbar] button", text="choose all that match")
    page.click("[role=toolbar] button", text=f"{action}…")
    says(page, f"{MANY:,} messages match")
    says(page, "in steps of 10,000 messages, for as long as this stays open. What is done stays done.")


def test_many_messages_are_changed_step_by_step_stopped_and_gone_on_with(site: Site) -> None:
    due = datetime.now(timezone.utc) + timedelta(days=30)
    with site.store() as store:
        store.send(
            DelayedMessage(destination="place", body=b"{}", due_at=due, message_id=f"s{n}", tag="many")
            for n in range(MANY)
        )
    page = site.alone("op")
    page.at_first(_HELD)
    page.go(f"{site.url}/delayed-deliveries/?store=delayed_store&tag=many")
    ask(page, "Cancel")
    page.click("dialog footer button", text="Cancel them")
    says(page, f"10,000 of {MANY:,} messages")
    for theme in ("light", "dark"):
        page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
        site.take(page, f"steps-{theme}")
        assert (theme, axe.violations(page)) == (theme, [])
    page.click("dialog footer button", text="Stop")
    page.wait_for("globalThis.goOn !== undefined")
    page.evaluate("globalThis.goOn() || true")
    # what is at work ends
    says(page, f"Stopped after 20,000 of {MANY:,} messages; the others are unchanged.")
    says(page, "20,000 messages cancelled")
    done(page)
    with site.store() as store:
        assert store.counts(tag="many").waiting == MANY - 20_000
        assert [one.counts for one in store.audit(limit=1)] == [{"cancelled": 20_000}]
        assert store.restore(tag="many").changed == 20_000
    # who closes the question stops it too, and still sees what was done
    page.go(f"{site.url}/delayed-deliveries/?store=delayed_store&tag=many")
    ask(page, "Cancel")
    page.click("dialog footer button", text="Cancel them")
    says(page, f"10,000 of {MANY:,} messages")
    page.wait_for("globalThis.goOn !== undefined")
    page.click("dialog header button", text="Close")
    page.evaluate("globalThis.goOn() || true")
    says(page, f"Stopped after 20,000 of {MANY:,} messages; the others are unchanged.")
    assert axe.violations(page) == []
    done(page)
    page.go(f"{site.url}/delayed-deliveries/?store=delayed_store&tag=many")
    listed(page, lambda ids: len(ids) == 50)
    with site.store() as store:
        store.erase(tag="many")


def test_of_very_many_messages_the_question_names_the_command(site: Site) -> None:
    page = site.alone("op")
    page.at_first(
        """const real = globalThis.fetch; globalThis.fetch = async (...given) => {
        const answer = await real(...given);
        if (!given[1]?.body?.includes('"dry_run":true')) return answer;
        return new Response(JSON.stringify({ ...await answer.json(), matching: 100_001, next: 'messages' })); }"""
    )
    page.go(f"{site.url}/delayed-deliveries/?store=delayed_store&destination=appointment-reminders")
    listed(page, lambda ids: len(ids) == 50)
    page.click("input[aria-label='Choose all on this page']")
    page.click("[role=toolbar] button", text="choose all that match")
    page.click("[role=toolbar] button", text="Cancel…")
    says(page, "100,001 messages match")
    says(page, "airflow delayed cancel --store-conn-id delayed_store --destination appointment-reminders")
