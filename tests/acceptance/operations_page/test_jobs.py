"""Changes of many messages on the page: jobs of the API server."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from support import axe
from support.browsed_page import Site, done, listed, says

from airflow_delayed.message import DelayedMessage

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]


def test_a_job_of_the_server_is_seen_stopped_and_started_again(site: Site) -> None:
    now = datetime.now(timezone.utc)
    page = site.alone("op")
    # the question says more than there are: so few are a job too
    page.at_first(
        """const ask = globalThis.fetch; globalThis.fetch = async (...given) => {
        const answer = await ask(...given);
        if (!given[1]?.body?.includes('"dry_run":true')) return answer;
        return new Response(JSON.stringify({ ...await answer.json(), matching: 60_000 })); }"""
    )
    with site.store() as store:
        store.send(
            DelayedMessage(
                destination="place", body=b"{}", due_at=now + timedelta(days=30), message_id=f"j{n}", tag="job"
            )
            for n in range(6000)
        )
        steps = iter(store.begin_job("cancel", {}, actor="user admin", tag="job"))
        next(steps)
        page.go(f"{site.url}/delayed-deliveries/?store=delayed_store&tag=job")
        says(page, "2,500 of 6,000 messages, running")
        page.click("#jobs button", text="Stop")
        says(page, "messages, stopping")
        list(steps)
        says(page, "Stopped by user op after 5,000 of 6,000 messages")
        # not before: a job without a step for half a minute counts as interrupted
        for theme in ("light", "dark"):
            page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
            site.take(page, f"job-{theme}")
            assert (theme, axe.violations(page)) == (theme, [])
        listed(page, lambda ids: len(ids) == 50)
        page.click("input[aria-label='Choose all on this page']")
        page.click("[role=toolbar] button", text="choose all that match")
    page.click("[role=toolbar] button", text="Erase…")
    says(page, "60,000 messages match")
    page.click("dialog footer button", text="Erase them")
    # also the cancelled ones: an erase is final
    says(page, "6,000 messages erased")
    assert axe.violations(page) == []
    done(page)
    says(page, "erase by user op (tag sha256:")
    assert site.state("j2999") == "erased"
