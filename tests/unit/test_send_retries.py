"""What a retry of DelayedSendOperator sends: what no earlier try had confirmed, and what may be twice."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from datetime import timedelta

import pytest
from airflow.sdk import Asset
from airflow.sdk.exceptions import AirflowFailException, AirflowRuntimeError
from airflow.sdk.execution_time.comms import ErrorResponse
from airflow.sdk.execution_time.context import OutletEventAccessors
from hypothesis import given
from hypothesis import strategies as st
from support.recorder import Recorder
from support.send_runs import NOW, Run, rows

from airflow_delayed import sending
from airflow_delayed.errors import Interrupted, LimitExceeded, SendFailed

CHUNK = 10


class Killed(BaseException):
    """As kill -9: nothing of the task's own is done any more."""


class Mortal(Recorder):
    """Takes messages until its sender is killed, which happens before any word of the last ones comes back."""

    kill_after: int | None = None

    def send(self, messages):
        def living():
            for message in messages:
                if self.kill_after is not None and len(self.sent) >= self.kill_after:
                    raise Killed
                yield message

        return super().send(living())


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(sending, "CHUNK", CHUNK)
    monkeypatch.setattr(sending, "AT_ONCE", 1)


@pytest.fixture
def run(monkeypatch):
    run = Run(monkeypatch)
    run.transport, run.store = Mortal(), Mortal("store", destinations=())
    return run


def killed(run, after, transport=None, **arguments):
    transport = transport or run.transport
    transport.kill_after = after
    with pytest.raises(Killed):
        run.execute(**arguments)
    transport.kill_after = None


def twice(run):
    return sum(count - 1 for count in Counter(run.ids()).values())


def test_a_retry_goes_on_after_the_last_confirmed_batch(run, log):
    killed(run, 37, messages=rows(100))
    run.now += timedelta(minutes=5)
    summary = run.execute(messages=rows(100))
    assert "goes on after 30 of 100 rows that an earlier try had confirmed" in log.text
    assert (len(set(run.ids())), twice(run)) == (100, 7)
    assert (summary["sent"], summary["earlier_tries"]) == (100, 30)
    assert summary["first_due"] == (NOW + timedelta(seconds=60)).isoformat()
    assert summary["last_due"] == (NOW + timedelta(seconds=159)).isoformat()
    assert "confirmed: 70 sent, 0 stored; beside the 30 of earlier tries" in log.text


def test_a_worker_that_shuts_down_ends_after_its_batch_and_the_retry_sends_the_rest_once(run):
    task = run.task(messages=rows(100))
    send = run.transport.send

    def shut_down(messages):
        task.on_kill()
        return send(messages)

    run.transport.send = shut_down
    run.try_number += 1
    with pytest.raises(Interrupted):
        task.execute(run.context)
    run.transport.send = send
    assert len(run.ids()) == CHUNK
    assert run.execute(messages=rows(100))["earlier_tries"] == CHUNK
    assert (len(set(run.ids())), twice(run)) == (100, 0)


def test_what_is_in_the_store_is_not_stored_again(run):
    mixed = [{"value": str(number), "delay_seconds": 3600 if number % 3 else 60} for number in range(90)]
    parameters = {"messages": mixed, "store_conn_id": "store"}
    killed(run, 32, run.store, **parameters)
    summary = run.execute(**parameters)
    sent = [message.message_id for message in run.transport.sent]
    stored = [message.message_id for message in run.store.sent]
    assert (len(set(sent)), len(set(stored))) == (30, 60)
    assert len(sent) + len(stored) - 90 <= CHUNK
    # what the first try had sent beyond its mark, the store had been told
    assert (len(sent), summary["sent"] + summary["duplicates"], summary["stored"]) == (30, 30, 60)
    assert summary["earlier_tries"] == 45


def test_rows_that_are_rejected_skipped_or_copies_move_no_mark(run, tmp_path):
    parameters = {
        "messages": [
            *rows(15),
            {"value": "bad", "delay_seconds": -1},
            *rows(15),  # copies
            {"value": "old", "due_at": NOW - timedelta(days=2)},
            *({"value": f"later {number}", "delay_seconds": 900} for number in range(30)),
        ],
        "rejects": str(tmp_path / "rejects.jsonl"),
        "past_due": "skip",
    }
    killed(run, 33, **parameters)
    summary = run.execute(**parameters)
    assert (len(set(run.ids())), twice(run)) == (45, 3)
    names = ("sent", "duplicates", "rejected", "skipped", "earlier_tries")
    assert [summary[name] for name in names] == [45, 15, 1, 1, 30]
    assert json.loads((tmp_path / "rejects.jsonl").read_text())["value"] == "bad"


@pytest.mark.parametrize(
    "changed",
    [
        {"messages": [*rows(99), {"value": "another", "delay_seconds": 1}]},
        {"messages": rows(99)},
        {"messages": [*rows(101)][1:]},
        {"messages": rows(100)[::-1]},
        {"messages": rows(100, tag="t")},
        {"messages": rows(100), "headers": {"h": "1"}},
        {"messages": rows(100), "conn_id": "another"},
        {"messages": rows(100), "envelope": "nservicebus"},
    ],
    ids=["a row", "a row less", "another range", "the order", "a tag", "an argument", "the connection", "the envelope"],
)
def test_what_has_changed_is_sent_from_the_top_and_what_has_not_has_the_same_id(run, log, changed):
    killed(run, 30, messages=rows(100))
    first = set(run.ids())
    run.transport.sent.clear()
    summary = run.execute(**changed)
    assert "30 rows, but the source or arguments are not what they were then: all is sent from the top" in log.text
    assert summary["earlier_tries"] == 0
    assert len(run.ids()) == len(changed["messages"]) == summary["sent"]
    if "headers" not in changed and "tag" not in changed["messages"][0]:
        assert first & set(run.ids())


def test_a_file_goes_on_unless_it_was_written_anew(run, tmp_path):
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(json.dumps(row) for row in rows(50)))
    killed(run, 20, source=str(source))
    killed(run, 35, source=str(source))
    source.write_text("\n\n".join(json.dumps(row) for row in rows(50)))
    # with the same ids
    assert run.execute(source=str(source))["earlier_tries"] == 0
    assert (len(set(run.ids())), twice(run)) == (50, 35)


def test_a_task_cleared_after_success_sends_all_again_with_the_same_ids(run):
    killed(run, 20, messages=rows(50))
    run.execute(messages=rows(50))
    run.clear()
    run.transport.sent.clear()
    summary = run.execute(messages=rows(50))
    assert (summary["sent"], summary["earlier_tries"], len(run.ids())) == (50, 0, 50)


def test_a_task_cleared_after_it_failed_half_way_goes_on_or_is_another_send(run):
    for on_clear, earlier, ids in (("same_ids", 20, 50), ("new_ids", 0, 70)):
        run.states.clear()
        run.transport.sent.clear()
        killed(run, 20, messages=rows(50), on_clear=on_clear)
        run.clear()
        assert run.execute(messages=rows(50), on_clear=on_clear)["earlier_tries"] == earlier
        assert len(set(run.ids())) == ids


def test_a_send_that_was_refused_is_over_and_the_next_is_sent_from_the_top(run):
    killed(run, 20, messages=rows(50))
    run.transport.destinations = set()
    with pytest.raises(AirflowFailException):
        run.execute(messages=rows(50))
    # the queue was made anew: who knows what became of what was in it
    run.transport.destinations = {"mail"}
    assert run.execute(messages=rows(50))["earlier_tries"] == 0


def test_a_source_that_cannot_be_read_for_a_while_ends_nothing(run, tmp_path):
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(json.dumps(row) for row in rows(50)))
    killed(run, 20, source=str(source))
    away = source.rename(tmp_path / "away")
    with pytest.raises(AirflowFailException):
        run.execute(source=str(source))
    away.rename(source)
    run.clear()
    assert run.execute(source=str(source))["earlier_tries"] == 20
    assert twice(run) == 0


def test_a_row_that_was_rejected_and_fits_later_is_sent(run, tmp_path, monkeypatch):
    """A limit may move with time, as that of a delay does."""
    far = NOW + timedelta(minutes=20)

    def check(message, now):
        if message.due_at - now > timedelta(minutes=15):
            raise LimitExceeded("due_at", "is too far off")

    monkeypatch.setattr(run.transport, "check", check)
    messages = [*rows(10), {"value": "far", "due_at": far}, *rows(40)[10:]]
    parameters = {"messages": messages, "rejects": str(tmp_path / "rejects.jsonl")}
    killed(run, 25, **parameters)
    run.now += timedelta(minutes=6)
    assert run.execute(**parameters)["sent"] == 41
    assert {message.body for message in run.transport.sent} >= {b"far"}


@pytest.mark.parametrize("changed", [{"past_due": "send"}, {"max_past": timedelta(days=9), "past_due": "skip"}])
def test_rows_that_were_skipped_as_stale_are_sent_when_that_is_asked_for(run, changed):
    old = [{"value": f"old {number}", "due_at": NOW - timedelta(days=2)} for number in range(10)]
    messages = [*old, *rows(40)]
    killed(run, 25, messages=messages, past_due="skip")
    run.clear()
    run.execute(messages=messages, **changed)
    assert len({message.body for message in run.transport.sent}) == 50


def test_an_event_names_the_destinations_with_the_most_messages_and_counts_the_others(run):
    """Of earlier tries, of this one, and of what is stored."""
    asset, names = Asset("reminders"), [f"q{number:03}" for number in range(120)]
    run.transport.destinations |= {"first", *names}
    to_store = [{"value": "x", "delay_seconds": 86_400 + number} for number in range(18)]
    parameters = {
        "messages": [
            *rows(10, destination="first"),
            *({"value": "x", "delay_seconds": 60, "destination": name} for name in [*names, "q119"]),
            {"value": "y", "delay_seconds": 60, "destination": "q119"},
            *({**row, "destination": "q000" if number < 15 else "first"} for number, row in enumerate(to_store)),
        ],
        "store_conn_id": "store",
        "outlets": [asset],
    }
    killed(run, 15, **parameters)
    events = OutletEventAccessors()
    run.task(**parameters).execute({**run.context, "outlet_events": events})
    extra = events[asset].extra
    assert "message_ids" not in extra
    named = extra["destinations"]
    assert {name: named[name] for name in list(named)[:4]} == {"q000": 16, "first": 13, "q119": 2, "q001": 1}
    assert (list(named)[:3], len(named)) == (["q000", "first", "q119"], 100)
    assert (extra["other_destinations"], extra["earlier_tries"], extra["stored"]) == (21, 10, 18)


def test_a_dry_run_neither_takes_nor_moves_a_mark(run, log):
    killed(run, 30, messages=rows(50))
    states = dict(run.states)
    assert run.execute(messages=rows(50), dry_run=True)["sent"] == 50
    assert run.states == states


def test_before_airflow_3_3_a_retry_sends_all_and_says_so_once(run, log):
    context = {"ti": run.context["ti"]}
    due = {"messages": rows(50, delay_seconds=None, due_at=NOW + timedelta(hours=1))}
    run.transport.kill_after = 30
    with pytest.raises(Killed):
        run.task(**due).execute(context)
    run.transport.kill_after = None
    run.now += timedelta(minutes=5)
    assert run.task(**due).execute(context)["sent"] == 50
    assert (len(set(run.ids())), twice(run)) == (50, 30)
    assert log.text.count("a retry sends all from the top, with the same ids") == 2


def test_a_mark_that_airflow_does_not_take_fails_nothing(run, log):
    class Away(type(run.states)):
        def set(self, key, value, retention=None):
            if "checkpoint" in key:
                raise AirflowRuntimeError(ErrorResponse())
            super().set(key, value)

    run.states = Away()
    assert run.execute(messages=rows(25))["sent"] == 25
    assert "did not keep that 10 rows are confirmed" in log.text


def test_what_is_kept_between_tries_shows_no_body(run):
    killed(run, 30, messages=rows(50, headers={"h": "hidden"}))
    kept = json.dumps(run.states)
    assert '"rows": 30' in kept
    assert "body" not in kept
    assert "hidden" not in kept


@given(
    st.lists(st.sampled_from(["near", "far", "copy"]), min_size=5, max_size=40),
    st.lists(
        st.tuples(st.sampled_from(["kill_after", "fail_after"]), st.booleans(), st.integers(0, 12)),
        min_size=1,
        max_size=5,
    ),
)
def test_whatever_ends_its_tries_nothing_is_lost_and_each_costs_one_batch_at_most(kinds, faults):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sending, "CHUNK", batch := 3)
        monkeypatch.setattr(sending, "AT_ONCE", 1)
        run = Run(monkeypatch)
        run.transport, run.store = Mortal(), Mortal("store", destinations=())
        messages = rows(1)
        for number, kind in enumerate(kinds):
            delay = 60 if kind == "near" else 5000
            messages.append(messages[-1] if kind == "copy" else {"value": f"{number}", "delay_seconds": delay})
        ended = False
        for name, in_store, more in faults:
            faulty = run.store if in_store else run.transport
            arrived = set(run.ids())
            before = len(run.ids())
            setattr(faulty, name, len(faulty.sent) + more)
            with suppress(Killed, SendFailed):
                run.execute(messages=messages, store_conn_id="store")
                ended = True
            setattr(faulty, name, None)
            assert sum(message_id in arrived for message_id in run.ids()[before:]) <= batch
            if ended:
                break
        if not ended:
            summary = run.execute(messages=messages, store_conn_id="store")
            done = summary["sent"] + summary["stored"]
            assert done <= len({row["value"] for row in messages}) <= done + summary["duplicates"]
        assert {message.body.decode() for message in [*run.transport.sent, *run.store.sent]} == {
            row["value"] for row in messages
        }
