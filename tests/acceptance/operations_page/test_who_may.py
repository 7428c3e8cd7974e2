"""The page by who is logged in."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import demo_ui
import httpx
import psutil
import pytest
from support.browsed_page import Site, act, done, figure, find, listed, says

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]


def test_a_viewer_reads_figures_and_acts_on_nothing(site: Site) -> None:
    page = site.open("viewer")
    assert figure(page, "Waiting") != ""
    find(page, id="offer-1")
    listed(page, lambda ids: ids == ["offer-1"])
    assert page.evaluate("page.querySelectorAll('#messages input[type=checkbox], [role=toolbar]').length") == 0
    page.click("td.id a", text="offer-1")
    says(page, "shown to those who may read the connection")
    assert "reminder" not in page.text().replace("appointment-reminders", "")
    site.take(page, "viewer")
    with site.world.live.client("viewer") as http:
        answer = http.post(
            "/delayed-deliveries/api/v1/stores/delayed_store/cancel", json={"ids": ["offer-1"], "dry_run": False}
        )
    assert answer.status_code == 403


def test_who_may_edit_a_dag_acts_on_what_it_sent(site: Site) -> None:
    page = site.open("user")
    boxes = "page.querySelectorAll('#messages tbody input[type=checkbox]').length"
    find(page, id="offer-1")
    listed(page, lambda ids: ids == ["offer-1"])
    assert page.evaluate(boxes) == 0
    find(page, dag_id=demo_ui.DAG)
    first, *others = listed(page, bool)
    assert page.evaluate(boxes) == 1 + len(others)
    page.click(f"input[aria-label='Choose {first}']")
    assert "Erase" not in page.evaluate("page.querySelector('[role=toolbar]').innerText")
    act(page, "Cancel…", "Cancel them")
    says(page, "1 message cancelled.")
    done(page)
    assert site.state(first) == "cancelled"


def test_what_is_moved_back_and_what_stays_is_told(site: Site) -> None:
    page = site.open("admin")
    # from the verdict to the connection
    page.evaluate("page.querySelectorAll('#verdict details.others').forEach(others => { others.open = true })")
    page.click("#verdict [data-code=unroutable] button", text="Show the connection")
    says(page, "Send unroutable messages again…")
    page.click("button", text="Send unroutable messages again…")
    says(page, "2 messages were unroutable. They name these destinations")
    # nothing goes where nobody has ticked it
    assert page.evaluate("page.querySelectorAll('dialog input[type=checkbox]:checked').length") == 0
    assert page.evaluate("page.querySelector('dialog button.primary').disabled")
    page.click("dialog input[type=checkbox]")
    assert not page.evaluate("page.querySelector('dialog button.primary').disabled")
    site.take(page, "redrive")
    page.click("dialog button", text="Leave them")
    assert figure(page, "Unroutable") == "2"
    page.click("button", text="Move dead letters back…")
    says(page, "Move 3 messages back")
    page.click("dialog button", text="Move them")
    page.wait_for("page.querySelector('dialog .notice') !== null")
    # the demo has put them there by hand
    says(page, "3 stay in the queue: came from another queue")


@pytest.mark.long
def test_the_demo_starts_by_itself_and_stops(here: Path, tmp_path: Path) -> None:
    program = [sys.executable, str(here / ".ci/demo_ui.py"), "--folder", str(tmp_path / "demo-ui")]
    demo = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    try:
        assert demo.stdout is not None
        shown = ""
        for line in demo.stdout:
            shown += line
            if "Ctrl-C" in line:
                break
        [url] = [word for word in shown.split() if word.startswith("http")]
        logins = dict(re.findall(r"login (\w+) +password (\S+)", shown))
        login = {"username": "op", "password": logins["op"]}
        base = url.removesuffix(demo_ui.PAGE)
        token = httpx.post(f"{base}/auth/token", json=login, timeout=60).raise_for_status().json()["access_token"]
        connections = f"{base}/delayed-deliveries/api/v1/connections"
        listed = httpx.get(connections, headers={"Authorization": f"Bearer {token}"}, timeout=60)
        assert "delayed_store" in listed.raise_for_status().text
        started = psutil.Process(demo.pid).children(recursive=True)
        demo.send_signal(signal.SIGINT)
        assert demo.wait(60) == 0
    finally:
        demo.kill()
        demo.wait()
        if demo.stdout is not None:
            demo.stdout.close()
    _, alive = psutil.wait_procs(started, timeout=5)
    assert [process.cmdline() for process in alive] == []
