"""Changes of many messages are jobs of the API server: watched, stopped, continued, from any of its processes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import datetime, timedelta, timezone
from pathlib import Path
from threading import Event

import pytest
from airflow.models.log import Log
from airflow.utils.session import create_session
from sqlalchemy import Engine, event, select
from support.forked import Child
from support.operations_page import Page, serving
from support.rabbitmq import eventually
from support.running_jobs import work
from support.standing import give_up
from support.stores import Store, Transport, message, on_postgres_only, on_postgres_too

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.identity import Origin

LATER = datetime(2030, 5, 6, 7, 8, 9, tzinfo=timezone.utc)
SECOND = timedelta(seconds=1)
#: More than two steps of a job, which are a thousand each; of a cancel by filter on PostgreSQL all of one.
MANY = 2500


@pytest.fixture
def top(store: Store, page: Page) -> str:
    return f"/api/v1/stores/{store.conn_id}"


@pytest.fixture
def hook(store: Store) -> DelayedStoreHook:
    made = store.installed()
    made.send(message(f"m{number:04}", LATER + number * SECOND, tag="t") for number in range(MANY))
    return made


def send_more(hook: DelayedStoreHook) -> None:
    """Store 1,500 messages that are due after the others."""
    hook.send(message(f"n{number:04}", LATER + timedelta(days=1), tag="t") for number in range(1500))


@pytest.fixture
def another(page: Page, tmp_path: Path) -> Iterator[Page]:
    """The page as another process of the API server has it."""
    with serving(tmp_path) as made:
        yield made


def logged(store: Store) -> list[str]:
    """What Airflow's own log has of cancels."""
    with create_session() as session:
        logs = session.scalars(select(Log.extra).where(Log.event == "delayed_deliveries.cancel")).all()
    return [extra for extra in logs if store.conn_id in extra]


def ended(page: Page, top: str, job: str) -> dict[str, object]:
    """The job when it has ended."""
    eventually(lambda: page.get(f"{top}/jobs/{job}")["ended_at"])
    return page.get(f"{top}/jobs/{job}")


@on_postgres_too
def test_a_job_changes_many_messages_and_can_be_watched_from_everywhere(
    store: Store, hook: DelayedStoreHook, page: Page, another: Page, top: str
):
    done = page.post(f"{top}/jobs", "op", action="cancel", filter={"tag": "t"}, most=MANY - 100, because="recall")
    assert (done["total"], done["total_at_least"], done["who"], done["action"]) == (2400, False, "user op", "cancel")
    last = ended(another, top, done["job"])
    assert (last["state"], last["counts"], last["considered"]) == ("done", {"cancelled": 2400}, 2400)
    assert [one.message_id for one in hook.list()] == [f"m{number:04}" for number in range(2400, MANY)]
    # all of it is one row of the audit, and one entry of Airflow's own
    assert [(one.who, one.counts, one.because) for one in hook.audit()] == [("user op", {"cancelled": 2400}, "recall")]
    # written after the job's own end
    eventually(lambda: logged(store))
    (entry,) = logged(store)
    assert f'"job": "{done["job"]}"' in entry
    assert '"outcomes": {"cancelled": 2400}' in entry
    # the first screen has no jobs where the store did not answer within two seconds
    eventually(lambda: page.get("/api/v1/live", store=store.conn_id)["jobs"] == [last])
    assert page.get(f"{top}/jobs")["jobs"] == [last]

    # the other actions
    give_up(hook, "m2499")
    moved = page.post(f"{top}/jobs", action="reschedule", filter={"tag": "t"}, due_at="2031-01-01T01:00:00+01:00")
    assert ended(page, top, moved["job"])["counts"] == {"rescheduled": 99}
    assert hook.get("m2400").due_at == datetime(2031, 1, 1, tzinfo=timezone.utc)
    retried = page.post(f"{top}/jobs", action="retry", filter={"state": ["failed"]})
    assert ended(page, top, retried["job"])["counts"] == {"retried": 1}
    back = page.post(f"{top}/jobs", action="restore", filter={"tag": "t", "state": ["cancelled"]}, most=1500)
    assert ended(page, top, back["job"])["counts"] == {"restored": 1500}
    # also what is cancelled and can still be taken back
    erased = page.post(f"{top}/jobs", action="erase", filter={"tag": "t"})
    assert ended(page, top, erased["job"])["counts"] == {"erased": MANY}
    assert list(hook.list()) == []
    # who erases leaves no tag
    assert '"tag": "t"' not in str([one["selection"] for one in page.get(f"{top}/jobs")["jobs"]])


def test_a_job_is_stopped_in_its_middle_beside_a_dispatcher(
    store: Store, hook: DelayedStoreHook, page: Page, another: Page, top: str
):
    now = hook.now()
    hook.send(message(f"due{number:04}", now - SECOND, tag="t") for number in range(1500))
    job = hook.begin_job("cancel", {}, actor="user op", tag="t")
    steps = iter(job)
    next(steps)
    seen = page.get(f"{top}/jobs/{job.seq}")
    assert (seen["state"], seen["total"], seen["counts"]) == ("running", 4000, {"cancelled": 1000})
    # a dispatcher takes what is due, and the job the rest
    transport = Transport()
    assert store.dispatcher(hook, transport).run().dispatched == 500
    next(steps)
    asked = another.post(f"{top}/jobs/{job.seq}/stop", "admin")
    assert (asked["state"], asked["stopped_by"], asked["considered"]) == ("stopping", "user admin", 2000)
    list(steps)
    seen = page.get(f"{top}/jobs/{job.seq}")
    assert (seen["state"], seen["counts"]) == ("stopped", {"cancelled": 3000})
    assert len(transport.ids) + 3000 + len(list(hook.list())) == 4000
    assert {hook.get(name).state for name in transport.ids} == {"dispatched"}
    assert len(list(hook.list())) == 500
    # it has ended: nothing changes that
    assert page.post(f"{top}/jobs/{job.seq}/stop") == seen
    assert page.error("POST", f"{top}/jobs/999/stop", json={}) == (404, "absent")
    assert page.error("GET", f"{top}/jobs/999") == (404, "absent")
    assert page.error("GET", f"{top}/jobs/x") == (400, "invalid")


@on_postgres_only
def test_a_job_whose_process_was_killed_is_interrupted_and_goes_on_when_it_is_started_again(
    store: Store, hook: DelayedStoreHook, page: Page, top: str, monkeypatch: pytest.MonkeyPatch
):
    send_more(hook)
    monkeypatch.setattr("airflow_delayed.store.jobs.JOB_SILENT", timedelta(hours=1))
    with closing(Child(work, conn_id=store.conn_id, tag="t")) as killed:
        job = killed.answer()
        assert page.get(f"{top}/jobs/{job}")["state"] == "running"
        killed.kill()
    monkeypatch.setattr("airflow_delayed.store.jobs.JOB_SILENT", timedelta(0))
    seen = page.get(f"{top}/jobs/{job}")
    assert (seen["state"], seen["considered"], seen["ended_at"]) == ("interrupted", MANY, None)
    monkeypatch.setattr("airflow_delayed.store.jobs.JOB_SILENT", timedelta(hours=1))
    again = page.post(f"{top}/jobs", action="cancel", filter={"tag": "t"})
    assert again["total"] == 1500
    assert ended(page, top, again["job"])["counts"] == {"cancelled": 1500}
    assert list(hook.list()) == []


@on_postgres_only
def test_a_job_that_the_database_refuses_says_why(
    store: Store, hook: DelayedStoreHook, page: Page, top: str, monkeypatch: pytest.MonkeyPatch
):
    store.sql(hook, """ALTER TABLE {s}"delayed_messages_past" ADD CONSTRAINT "guard" CHECK ("Id" <> 'n0500')""")
    send_more(hook)
    job = page.post(f"{top}/jobs", action="cancel", filter={"tag": "t"})["job"]
    failed = ended(page, top, job)
    assert (failed["state"], failed["counts"]) == ("failed", {"cancelled": MANY})
    assert "guard" in failed["problem"]
    assert "n0500" not in failed["problem"]
    assert len(list(hook.list())) == 1500
    # a broker's or a database's words are for those who may read the connection
    monkeypatch.setenv("AIRFLOW__DELAYED__VIEWERS", "plugins")
    assert "guard" not in str(page.get(f"{top}/jobs/{job}", "viewer"))


def test_few_jobs_work_at_once_and_few_are_kept(
    store: Store, hook: DelayedStoreHook, page: Page, top: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("airflow_delayed.store.jobs.JOBS_KEPT", 3)
    jobs = [hook.begin_job("cancel", {}, actor="user op", tag="t") for _ in range(3)]
    answer = page.ask("POST", f"{top}/jobs", json={"action": "cancel", "filter": {"tag": "t"}})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "busy")
    list(jobs[0])
    last = page.post(f"{top}/jobs", action="cancel", filter={"tag": "t"})
    ended(page, top, last["job"])
    kept = [last["job"], *(str(one.seq) for one in reversed(jobs[1:]))]
    assert [one["job"] for one in page.get(f"{top}/jobs")["jobs"]] == kept
    # a row of another hand is no error of the page
    table = hook.tables.jobs
    with hook.engine.begin() as connection:
        connection.execute(table.update().where(table.c.Seq == int(last["job"])).values(State="bogus"))
    assert page.get(f"{top}/jobs")["jobs"][0]["state"] == "failed"
    # too slow is no error of the row
    eventually(lambda: page.get("/api/v1/live", store=store.conn_id)["error"] is None)
    # a job that is kept no longer ends all the same, and the audit has each
    assert len(list(hook.audit())) == 4


@pytest.mark.usefixtures("nightly")
@pytest.mark.parametrize("store", ["postgres", "mariadb"], indirect=True)
def test_of_two_jobs_that_begin_at_once_one_begins(page: Page, top: str, monkeypatch: pytest.MonkeyPatch):
    """The first is about to write its row when the second looks how many are at work."""
    monkeypatch.setattr("airflow_delayed.ui.api_jobs.MOST_JOBS", 1)
    # it stays at work
    monkeypatch.setattr("airflow_delayed.ui.api_jobs._work", lambda hook, *_: hook.close())
    first, second = Event(), Event()

    def before(connection: object, cursor: object, statement: str, *_: object) -> None:
        writes_job = statement.startswith("INSERT") and "_jobs" in statement
        if writes_job and not first.is_set():
            first.set()
            assert second.wait(60)
        elif first.is_set() and (statement.startswith("INSERT") or "FOR UPDATE" in statement):
            second.set()

    event.listen(Engine, "before_cursor_execute", before)
    try:
        with ThreadPoolExecutor(2) as threads:
            job = {"action": "cancel", "filter": {"tag": "t"}}
            begun = threads.submit(page.ask, "POST", f"{top}/jobs", json=job)
            assert first.wait(60)
            statuses = [page.ask("POST", f"{top}/jobs", json=job).status_code, begun.result().status_code]
    finally:
        event.remove(Engine, "before_cursor_execute", before)
    assert statuses == [503, 200]
    assert len(page.get(f"{top}/jobs")["jobs"]) == 1


@pytest.mark.usefixtures("nightly")
def test_who_may_edit_a_dag_has_jobs_of_what_it_sent(
    store: Store, hook: DelayedStoreHook, page: Page, top: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AIRFLOW__DELAYED__VIEWERS", "plugins")
    sent = Origin(dag_id="nightly", run_id="r", task_id="t", map_index=-1)
    store.hook(origin=sent).send([message("sent", LATER)])
    by_dag = {"action": "cancel", "filter": {"dag_id": "nightly"}}
    assert page.error("POST", f"{top}/jobs", "viewer", json=by_dag) == (403, "forbidden")
    for other in ({"filter": {"tag": "t"}}, {"action": "erase"}):
        assert page.error("POST", f"{top}/jobs", "user", json={**by_dag, **other}) == (403, "forbidden")
    job = page.post(f"{top}/jobs", "user", **by_dag)["job"]
    ended(page, top, job)
    assert [page.get(f"{top}/jobs/{job}", role)["may_stop"] for role in ("viewer", "user", "op")] == [False, True, True]
    page.post(f"{top}/jobs/{job}/stop", "user")
    others = hook.begin_job("cancel", {}, actor="user op", tag="t")
    assert page.error("POST", f"{top}/jobs/{others.seq}/stop", "user", json={}) == (403, "forbidden")
    for wrong in (
        {"action": "purge", "filter": {"tag": "t"}},
        {"action": "cancel", "filter": {}},
        {"action": "cancel", "filter": {"tag": "t"}, "delay_seconds": 1},
        {"action": "reschedule", "filter": {"tag": "t"}},
        {"action": "reschedule", "filter": {"tag": "t"}, "delay_seconds": 1, "due_at": LATER.isoformat()},
        {"action": "retry", "filter": {"state": ["waiting"]}},
        {"action": "cancel", "filter": {"state": ["cancelled"]}},
        {"action": "cancel", "ids": ["sent"]},
    ):
        assert page.error("POST", f"{top}/jobs", json=wrong) == (400, "invalid"), wrong
