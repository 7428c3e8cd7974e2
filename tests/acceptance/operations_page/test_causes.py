"""The verdict by destination, and what can be done about each cause."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone

import pytest
from support import axe
from support.browsed_page import Site, answers, says

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

_SINCE = (datetime.now(timezone.utc) - timedelta(minutes=5)).isoformat()
_NOTHING = {"paused_dag": None, "run_dag": None, "pause": None, "why": None, "queue": None}
_COMMAND = "airflow delayed install --conn-id delayed_rabbitmq --queue letters"
#: A destination that is not there, and one that takes nothing, beside one that takes everything.
_VERDICT = {
    "status": "failing",
    "partly": True,
    "lateness": [
        {"destination": "letters", "status": "failing", "code": "destination-missing", "late_seconds": 0},
        {"destination": "emails", "status": "failing", "code": "destination-refuses", "late_seconds": 263},
        {"destination": "orders", "status": "delivering", "code": None, "late_seconds": 0, "p99_seconds": 0.4},
    ],
    "causes": [
        {
            **_NOTHING,
            "code": "destination-missing",
            "severity": "error",
            "connection_id": "delayed_store",
            "kind": "store",
            "where": "destination 'letters' of connection 'delayed_rabbitmq'",
            "what": "it is not there",
            "remedy": f"make it: {_COMMAND}; then retry what was given up",
            "since": _SINCE,
            "states": ["failed"],
            "deliver_conn_id": "delayed_rabbitmq",
            "destination": "letters",
        },
        {
            **_NOTHING,
            "code": "unreachable",
            "severity": "error",
            "connection_id": "delayed_rabbitmq",
            "kind": "rabbitmq",
            "where": "connection 'delayed_rabbitmq'",
            "what": "nothing listens",
            "remedy": "look whether its server runs, with the host that Airflow has for it under Admin, Connections",
            "since": _SINCE,
            "states": [],
            "deliver_conn_id": None,
            "destination": None,
        },
    ],
}
for one in _VERDICT["lateness"]:
    more = {"store_conn_id": "delayed_store", "conn_id": "delayed_rabbitmq", "overdue": 0, "dispatched": 9}
    one |= {"p99_seconds": None, "since": _SINCE if one["code"] else None, "until": None, **more, **one}


def test_each_destination_is_named_and_each_cause_has_its_action(site: Site) -> None:
    page = site.open("op")
    # of what has really failed: as many as there are
    page.evaluate("page.querySelectorAll('#verdict details.others').forEach(others => { others.open = true })")
    page.click("#verdict [data-code=failed] button", text="Retry 4…")
    says(page, "4 messages match")
    page.click("dialog button", text="Leave them as they are")
    answers(
        page,
        f"""
    const answer = await real(address, options);
    if (!String(address).includes('/live')) return answer;
    const found = await answer.json();
    found.health = {{ ...found.health, ...{json.dumps(_VERDICT)} }};
    return new Response(JSON.stringify(found));""",
    )
    says(page, "Partly delivering")
    [letters, emails, orders] = page.evaluate("[...page.querySelectorAll('.destinations li')].map(li => li.innerText)")
    assert letters.startswith("delayed_rabbitmq/letters not there since ")
    assert emails.startswith("delayed_rabbitmq/emails refused since ")
    assert "4.4 min late" in emails
    assert orders.startswith("delayed_rabbitmq/orders delivering, 99 % within 0.4 s")
    edit = "page.querySelector('#verdict [data-code=unreachable] a').getAttribute('href')"
    assert page.evaluate(edit).endswith("/connections?name_pattern=delayed_rabbitmq")
    # a command is on a line of its own, and goes to the clipboard as it is typed
    assert page.evaluate("page.querySelector('#verdict .command code').innerText") == _COMMAND
    page.click("#verdict .command button")
    says(page, "Copied")
    assert axe.violations(page) == []
    site.take(page, "causes")
    # and what does the same in Airflow
    says(page, "In Airflow: trigger the DAG that has the TopologyInstallOperator for it.")
