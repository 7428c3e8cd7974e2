"""The page in trouble, and with odd or very many messages."""

from __future__ import annotations

import re
import time
from datetime import datetime, timedelta, timezone

import pytest
from support import axe
from support.browsed_page import FRAME, Site, answers, done, find, listed, look_up, says

from airflow_delayed.message import DelayedMessage
from services import chromium

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
#: The server's answers when a store and a broker hang: their last figures, and no list.
_HANGING = """
    const answer = await real(address, options);
    if (!String(address).includes('/live')) return answer;
    const found = await answer.json();
    const hanging = found.connections.filter(one => ['delayed_store', 'delayed_rabbitmq'].includes(one.connection_id));
    for (const one of hanging) {
        one.error = { code: 'too_slow', message: `connection '${one.connection_id}' has not answered yet` };
        one.age_seconds = 95;
    }
    return new Response(JSON.stringify({ ...found, page: null, error: hanging[0].error }));"""
#: A server that accepts and says nothing, as a browser takes it in the end.
_SILENT = "throw new DOMException('', 'TimeoutError');"
_LOGIN_LOST = "return new Response('{}', { status: 401 });"
#: All is well now, but for what went out late, so that the list moves up to where causes stood.
_ALL_IS_WELL = """
    const answer = await real(address, options);
    if (!String(address).includes('/live')) return answer;
    const found = await answer.json();
    found.health = { ...found.health, status: 'ok', causes: [], lateness: [{ store_conn_id: 'delayed_store',
        conn_id: 'broker', destination: 'orders', status: 'late', overdue: 0, late_seconds: 0, dispatched: 1,
        p99_seconds: 15 }] };
    window.well = true;
    return new Response(JSON.stringify(found));"""
_AS_BEFORE = "return real(address, options);"


def alerts(page: chromium.Page) -> list[str]:
    return list(page.evaluate("[...page.querySelectorAll('[role=alert]')].map(alert => alert.innerText)"))


def test_trouble_is_said_once_and_the_last_figures_stay_with_their_age(site: Site) -> None:
    page = site.open("op")
    failed = "page.querySelector('[data-key=\"state Failed\"]').innerText"
    fresh = "page.querySelector('#fresh').innerText"
    page.wait_for("page.querySelectorAll('#overview [aria-busy=true]').length === 0")
    page.wait_for("page.querySelector('[data-connection=down_store] [role=alert]') !== null")
    page.wait_for("page.querySelectorAll('table.list tbody tr').length > 1")
    page.wait_for("page.querySelector('.timeline g') !== null")
    before, height = page.evaluate(failed), page.evaluate("page.documentElement.scrollHeight")
    for script, said in ((_LOGIN_LOST, "Your login has ended."), (_SILENT, "Airflow's API server does not answer.")):
        answers(page, script)
        says(page, said)
        # once, and all that stays is greyed, with its age; nothing moves but by that one line
        assert [said in alert for alert in alerts(page)] == [True]
        assert page.evaluate(fresh).startswith("Not updated since ")
        says(page, "The list is from ")
        says(page, "last seen ")
        assert page.evaluate("page.querySelectorAll('#verdict .stale, #messages .stale, .card .stale').length") >= 5
        assert page.evaluate(failed) == before
        assert abs(page.evaluate("page.documentElement.scrollHeight") - height) < 200
        site.take(page, f"trouble-{'login' if script is _LOGIN_LOST else 'silent'}")
    assert axe.violations(page) == []
    # of two connections that hang the last figures stay, and the others go on
    answers(page, _HANGING)
    page.wait_for(f"{fresh}.endsWith('the list of messages')")
    assert all(name in page.evaluate(fresh) for name in ("but not ", "delayed_store", "delayed_rabbitmq"))
    page.wait_for("page.querySelector('[data-connection=delayed_rabbitmq] .stale .figures') !== null")
    says(page, "connection 'delayed_rabbitmq' has not answered yet")
    # on a busy machine SQS too may answer one look too late
    page.wait_for("page.querySelector('[data-connection^=delayed_sqs] .stale') === null")
    assert page.evaluate("page.querySelector('#messages .stale td.id') !== null")
    # no card stands beside a hole: two columns, each without a gap
    gaps = """[...page.querySelectorAll('#overview > div')].flatMap(column => [...column.children].slice(1).map(
        card => card.getBoundingClientRect().top - card.previousElementSibling.getBoundingClientRect().bottom))"""
    assert all(gap < 20 for gap in page.evaluate(gaps))
    site.take(page, "trouble-store")
    # by itself all is well again
    answers(page, _AS_BEFORE)
    page.wait_for(f"page.querySelectorAll('.stale').length === 0 && {fresh}.startsWith('Updated')")
    # what is new waits for the pointer: nothing moves away below a finger that presses
    place = "page.querySelector('table.list tbody tr').getBoundingClientRect().top"
    page.evaluate("page.defaultView.scrollTo(0, 0)")
    with page.hold("#messages-title"):
        before = page.evaluate(place)
        answers(page, _ALL_IS_WELL)
        page.wait_for("page.defaultView.well")
        time.sleep(0.3)
        assert page.evaluate(place) == before
    says(page, "All is well. Nothing is overdue any more; some went out late in the last 2 min.")
    page.wait_for(f"{place} < {before}")
    site.take(page, "well")
    answers(page, _AS_BEFORE)
    # whose login has really ended logs in, and is back at the same messages
    page.click("[data-key='state Expired']")
    page.wait_for("new URLSearchParams(location.search).get('state') === 'expired'")
    page.evaluate("fetch('/api/v2/auth/logout')")
    page.click("#refresh")
    page.click("#verdict a", text="Log in")
    page.frame = None
    site.log_in(page, "op")
    page.frame = FRAME
    listed(page, lambda ids: len(ids) == 3)


def test_ten_thousand_messages_an_odd_id_and_a_wrong_clock(site: Site) -> None:
    now = datetime.now(timezone.utc)
    odd = "".join(map(chr, range(33, 127)))

    def message(name: str, number: int) -> DelayedMessage:
        return DelayedMessage(
            destination=f"place-{number % 2000}",
            body=b"{}",
            due_at=now + timedelta(days=30),
            message_id=name,
            tag="one of many",
        )

    with site.store() as store:
        store.send([message(odd, 0), *(message(f"many-{number}", number) for number in range(9_999))])
    page = site.alone("op")
    page.at_first(
        """const Right = Date; globalThis.Date = class extends Right {
        constructor(...given) { given.length ? super(...given) : super(Right.now() + 864e5); }
        static now() { return Right.now() + 864e5; } }"""
    )
    page.go(f"{site.url}/delayed-deliveries/")
    # the times are the server's
    page.wait_for("page.querySelector('#fresh').innerText.startsWith('Updated')")
    [shown] = re.findall(r"[-\d]+ [:\d]+", page.evaluate("page.querySelector('#fresh').innerText"))
    assert abs(datetime.fromisoformat(f"{shown}+00:00") - now) < timedelta(minutes=10)
    # an id with every printable character is found, opened, and has an address
    look_up(page, odd, f"id {odd}")
    listed(page, lambda ids: ids == [odd])
    page.click("td.id a")
    says(page, "History")
    page.go(str(page.evaluate("location.href")))
    says(page, "History")
    assert page.evaluate("page.querySelector('dialog dd').innerText") == odd
    page.press("Escape")
    # one of 2,000 destinations, then all 10,000 messages, changed by one answer
    find(page, destination="place-1999")
    listed(page, lambda ids: len(ids) == 4)
    find(page, tag="one of many")
    listed(page, lambda ids: len(ids) == 50)
    says(page, "tag: one of many")
    page.click("nav.pages button", text="Next")
    says(page, "Page 2")
    page.click("input[aria-label='Choose all on this page']")
    page.click("[role=toolbar] button", text="choose all that match")
    page.click("[role=toolbar] button", text="Cancel…")
    says(page, "10,000 messages match")
    page.click("dialog footer button", text="Cancel them")
    says(page, "10,000 messages cancelled.")
    done(page)
    assert site.state(odd) == "cancelled"
