"""What DelayedSendOperator does before and around a transport; the transports' own tests are elsewhere."""

from __future__ import annotations

import json
from datetime import datetime, timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from airflow.sdk import DAG, task
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException
from support.send_runs import NOW, States, rows

from airflow_delayed.delivery import Finding, State, TopologyReport
from airflow_delayed.errors import SendFailed
from airflow_delayed.identity import key_id
from airflow_delayed.message import UTC
from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.sources import ParquetSource


def test_one_message(run):
    summary = run.execute(value="hello", delay="90", headers={"h": "1"}, tag="customer")
    (message,) = run.transport.sent
    assert (message.body, message.due_at, message.tag) == (b"hello", NOW + timedelta(seconds=90), "customer")
    assert summary == {
        "sent": 1,
        "stored": 0,
        "replaced": 0,
        "not_replaced": 0,
        "duplicates": 0,
        "rejected": 0,
        "skipped": 0,
        "earlier_tries": 0,
        "first_due": "2026-03-01T12:01:30+00:00",
        "last_due": "2026-03-01T12:01:30+00:00",
        "message_ids": [message.message_id],
    }
    assert run.transport.closed == 1


def test_retry_means_the_same_messages_although_the_clock_went_on(run):
    run.transport.fail_after = 2
    with pytest.raises(SendFailed):
        run.execute(messages=rows(3))
    first = [(message.message_id, message.due_at) for message in run.transport.sent]
    run.transport.sent.clear()
    run.transport.fail_after = None
    run.now += timedelta(minutes=20)
    run.execute(messages=rows(3))
    assert [(message.message_id, message.due_at) for message in run.transport.sent][:2] == first
    assert len(run.transport.sent) == 3


def test_other_run_means_other_messages(run):
    run.execute(messages=rows(3))
    first = set(run.ids())
    run.run_id, run.states, run.try_number = "run-2", States(), 0
    run.execute(messages=rows(3))
    assert len(set(run.ids()) - first) == 3


def test_bad_row_stops_everything_before_anything_is_sent(run):
    bad = [*rows(500), {"value": "x", "delay_seconds": -1}, {"value": "y" * 101, "delay_seconds": 1}]
    with pytest.raises(AirflowFailException) as caught:
        run.execute(messages=bad)
    assert "2 of 502 rows" in str(caught.value)
    assert "messages row 501, column delay_seconds: -1 is negative" in str(caught.value)
    assert "messages row 502, column body: is 101 bytes, and the limit is 100" in str(caught.value)
    assert run.transport.sent == []


@pytest.mark.parametrize("name", ["destination", "tag", "message_id", "conn_id", "timezone"])
@pytest.mark.parametrize("value, says", [("None", "render to nothing"), (" ", "render to nothing"), ([1], "is a list")])
def test_a_template_that_renders_to_nothing_is_an_error(run, name, value, says):
    operator = run.task(value="x", delay=1)
    # as Airflow sets a rendered field
    setattr(operator, name, value)
    with pytest.raises(AirflowFailException, match=f"{name}= .*{says}"):
        operator.execute(run.context)
    assert run.ids() == []


def test_what_native_rendering_makes_of_numbers_and_of_nothing(run):
    operator = run.task(value="x", delay=1)
    operator.message_id, operator.tag, operator.store_conn_id, operator.topology = 7, 42, "", "None"
    operator.execute(run.context)
    [message] = run.transport.sent
    assert (message.message_id, message.tag, run.store.sent) == ("7", "42", [])


TEXTS = ["007", "1.10", "1_000", "12", '{"a": 1.10}', "[1,  2]", "'q'", "True", "1e5"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("template", ["{{ params.text }}", "{{ params.text[0] }}{{ params.text[1:] }}"])
def test_a_text_stays_one_where_a_dag_renders_native_types(run, text, template):
    texts = {"message_id": text.replace(" ", ""), "tag": text, "headers": {"h": text}, "value": text}
    for arguments in (
        {"messages": [{name: "{{ params." + name + " }}" for name in ("message_id", "tag", "value")}]},
        {"value": template, "tag": template, "message_id": "{{ params.message_id }}", "headers": {"h": template}},
        texts,
    ):
        with DAG("native", schedule=None, render_template_as_native_obj=True):
            operator = run.task(delay=1, **arguments)
        context = {**run.context, "params": {**texts, "text": text}}
        operator.render_template_fields(context)
        run.try_number += 1
        operator.execute(context)
        run.states.clear()
        message = run.transport.sent.pop()
        assert (message.body.decode(), message.message_id, message.tag) == (text, texts["message_id"], text)
        assert "messages" in arguments or message.headers == {"h": text}


def test_what_is_no_text_stays_what_it_is_where_a_dag_renders_native_types(run):
    with DAG("native", schedule=None, render_template_as_native_obj=True):
        operator = run.task(messages="{{ params.rows }}", id_columns="{{ params.columns }}")
    context = {**run.context, "params": {"rows": [{"value": {"n": 1}, "delay_seconds": 5, "a": 1}], "columns": ["a"]}}
    operator.render_template_fields(context)
    operator.execute(context)
    assert run.bodies() == ['{"n":1}']


def test_a_body_of_default_args_is_that_of_all_mapped_tasks(run, run_dag):
    defaults = {"value": "{{ dag.dag_id }} {{ ti.map_index }}", "conn_id": "recorder", "destination": "mail"}
    with DAG("mapped", schedule=None, default_args=defaults) as dag:

        @task
        def arguments():
            return [{"delay": 3600}, {"delay": 7200, "value": "{{ no template }}"}]

        DelayedSendOperator.partial(task_id="send").expand(delay=[3600])
        DelayedSendOperator.partial(task_id="send_many").expand_kwargs(arguments())
    assert run_dag(dag).state == "success"
    assert sorted(run.bodies()) == ["mapped 0", "mapped 0", "{{ no template }}"]


def test_missing_destination_is_named_before_anything_is_sent(run):
    with pytest.raises(AirflowFailException, match=r"no destination sms, voice; .*create_destinations=True"):
        run.execute(messages=[*rows(3), *rows(1, destination="voice"), *rows(1, destination="sms")])
    assert run.transport.sent == []


def test_rows_alike_in_everything_are_one_message_and_counted(run):
    summary = run.execute(messages=[*rows(3), *rows(2)])
    assert (summary["sent"], summary["duplicates"]) == (3, 2)
    assert len(set(run.ids())) == 3


def test_same_id_with_other_content_is_an_error_that_names_both_rows(run):
    clash = [{**row, "order": 7} for row in rows(2)]
    with pytest.raises(AirflowFailException, match="messages row 1 and messages row 2"):
        run.execute(messages=clash, id_columns="order")
    assert run.transport.sent == []


def past(**fields):
    return [
        {"value": "old", "due_at": NOW - timedelta(hours=2)},
        {"value": "recent", "due_at": NOW - timedelta(minutes=59)},
        {"value": "new", "due_at": NOW + timedelta(hours=1)},
    ]


def test_stale_rows_are_refused_with_count_and_first_row(run):
    with pytest.raises(
        AirflowFailException, match=r"1 of 3 rows were due more than 1:00:00 .*messages row 1, due 2026-03-01 10"
    ):
        run.execute(messages=past())
    assert run.transport.sent == []


def test_stale_rows_can_be_skipped_or_sent(run, log):
    assert run.execute(messages=past(), past_due="skip")["skipped"] == 1
    assert "1 past due, which are skipped" in log.text
    assert [message.body for message in run.transport.sent] == [b"recent", b"new"]
    run.transport.sent.clear()
    assert run.execute(messages=past(), past_due="send", dry_run=True)["sent"] == 3
    assert "1 past due, which are sent at once" in log.text
    assert run.execute(messages=past(), past_due="send")["sent"] == 3


def test_task_that_was_refused_and_is_cleared_days_later_fires_nothing_stale(run):
    with pytest.raises(AirflowFailException):
        run.execute(messages=[{"value": "x", "due_at": NOW + timedelta(hours=5)}, {"value": "x", "due_at": "soon"}])
    run.now += timedelta(days=2)
    with pytest.raises(AirflowFailException, match="were due more than"):
        run.execute(messages=[{"value": "x", "due_at": NOW + timedelta(hours=5)}])


def test_retry_after_a_fault_never_refuses_its_own_rows_and_the_next_clear_does(run):
    soon = [{"value": str(number), "due_at": NOW + timedelta(minutes=1)} for number in range(3)]
    run.transport.fail_after = 2
    with pytest.raises(SendFailed):
        run.execute(messages=soon)
    run.now += timedelta(hours=30)
    run.transport.fail_after = None
    assert run.execute(messages=soon)["sent"] == 3
    run.clear()
    with pytest.raises(AirflowFailException, match="were due more than"):
        run.execute(messages=soon)


def test_other_content_under_an_id_of_the_store_is_an_error_before_anything_is_sent(run):
    stored = [{"value": "x", "delay_seconds": 3600, "message_id": "order-7"}, *rows(2, message_id="near")[:1]]
    run.execute(messages=stored, store_conn_id="store")
    run.transport.sent.clear()
    stored[0]["value"] = "y"
    with pytest.raises(AirflowFailException, match=r"under the same ids: order-7\. Nothing was sent"):
        run.execute(messages=stored, store_conn_id="store")
    assert run.transport.sent == []
    assert len(run.store.sent) == 1


def test_what_is_due_later_waits_in_the_store(run):
    due = [{"value": str(minutes), "due_at": NOW + timedelta(minutes=minutes)} for minutes in (1, 5, 6, 60)]
    summary = run.execute(messages=due, store_conn_id="store", hold_over=timedelta(minutes=5))
    assert (summary["sent"], summary["stored"]) == (2, 2)
    assert [message.body for message in run.transport.sent] == [b"1", b"5"]
    assert [message.body for message in run.store.sent] == [b"6", b"60"]


def test_what_the_transport_cannot_delay_by_itself_is_stored_in_any_case(run, log):
    run.transport.horizon = timedelta(seconds=870)
    due = [{"value": "x", "delay_seconds": seconds} for seconds in (870, 871, 900)]
    summary = run.execute(messages=due, store_conn_id="store", hold_over=timedelta(hours=1))
    assert (summary["sent"], summary["stored"]) == (1, 2)
    assert "hold_over is 0:14:30" in log.text


def test_on_conflict_goes_to_the_store_that_there_is(run):
    run.execute(messages=rows(1), store_conn_id="store", on_conflict="replace")
    assert run.options == {"on_conflict": "replace"}
    # a transport that has no such option says so, and the default asks for nothing
    run.execute(messages=rows(1), on_conflict="keep")
    assert run.options == {"on_conflict": "keep"}
    run.execute(messages=rows(1))
    assert run.options == {}


def test_what_stays_until_it_is_due_all_waits_in_the_store(run, log):
    summary = run.execute(messages=rows(3), store_conn_id="store", until_due=True)
    assert (summary["sent"], summary["stored"], run.options) == (0, 3, {"until_due": True})
    # a dispatcher is at work
    assert "StoreDispatchOperator" not in log.text
    # a store that delivers itself
    run.transport.horizon = timedelta(0)
    run.execute(messages=rows(1), conn_id="store", store_conn_id="store", until_due=True)
    assert run.options == {"until_due": True}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "until_due=True needs a store, and store_conn_id= names none: only there can messages wait until"),
        ({"store_conn_id": "store", "hold_over": "PT5M"}, r"and hold_over= sends messages that are due soon at once"),
    ],
)
def test_what_stays_until_it_is_due_needs_a_store_and_no_hold_over(run, arguments, says):
    with pytest.raises(ValueError, match=says):
        run.task(messages=rows(1), until_due=True, **arguments)
    run.task(messages=rows(1), until_due=True, store_conn_id="store", hold_over=timedelta(0))


def test_a_store_whose_template_rendered_to_nothing_is_an_error_where_one_is_needed(run):
    with pytest.raises(AirflowFailException, match="until_due=True needs a store"):
        run.execute(messages=rows(1), until_due=True, store_conn_id="None")
    assert run.ids() == []


def test_on_conflict_is_checked_when_the_dag_is_read_or_rendered(run):
    with pytest.raises(ValueError, match="on_conflict='ignore' is none of 'error', 'keep', 'replace'"):
        run.task(messages=rows(1), on_conflict="ignore")
    task = run.task(messages=rows(1), on_conflict="{{ x }}")
    task.render_template_fields({"x": "replace"})
    assert task.on_conflict == "replace"
    with pytest.raises(AirflowFailException, match=r"on_conflict=.* is none of"):
        run.execute(messages=rows(1), on_conflict="{{ x }}")
    assert run.ids() == []


def test_connection_that_is_a_store_holds_all_by_itself(run):
    run.transport.horizon = timedelta(0)
    assert run.execute(messages=rows(3))["stored"] == 3
    with pytest.raises(AirflowFailException, match="leave store_conn_id='store' out"):
        run.execute(messages=rows(3), store_conn_id="store")


def test_envelope_of_a_task_goes_to_the_transport_and_never_past_a_store(run):
    run.execute(messages=rows(1))
    assert run.options == {}
    run.execute(messages=rows(1), envelope="")
    assert run.options == {}
    run.execute(messages=rows(1), envelope="nservicebus")
    assert run.options == {"envelope": "nservicebus"}
    with pytest.raises(AirflowFailException, match=r"envelope= cannot go with store_conn_id=.* extra of 'recorder'"):
        run.execute(messages=rows(1), envelope="raw", store_conn_id="store")


def test_what_verify_doubts_is_told_and_the_messages_are_sent(run, log, monkeypatch):
    doubts = {State.WARNING: "leaks", State.BLOCKED: "is full", State.UNKNOWN: "nobody tells", State.OK: "is fine"}
    report = TopologyReport(
        tuple(Finding(state=state, resource=state.name, found=text) for state, text in doubts.items())
    )
    monkeypatch.setattr(run.transport, "verify", lambda names, max_delay=None: report)
    assert run.execute(messages=rows(2))["sent"] == 2
    logged = [
        line for line in log.text.splitlines() if "WARNING: " in line or "BLOCKED: " in line or "UNKNOWN: " in line
    ]
    assert ["warning" in line for line in logged] == [True, True, False]
    assert "is fine" not in log.text


def test_messages_are_stored_although_no_dispatcher_is_at_work(run, log, monkeypatch):
    silent = Finding(state=State.BLOCKED, resource="store", found="no dispatcher", code="no-dispatcher")
    monkeypatch.setattr(run.store, "verify", lambda names: TopologyReport((silent,)))
    far = [{"value": "x", "delay_seconds": 86_400}]
    assert run.execute(messages=far, store_conn_id="store")["stored"] == 1
    assert "store: no dispatcher" in log.text


def test_more_messages_than_an_installation_allows_are_refused_before_the_first(run, monkeypatch):
    monkeypatch.setenv("AIRFLOW__DELAYED__MAX_MESSAGES_PER_RUN", "3")
    with pytest.raises(AirflowFailException, match=r"4 messages are more than the 3 that .* nothing was sent"):
        run.execute(messages=rows(4))
    assert run.transport.sent == []
    assert run.execute(messages=rows(3))["sent"] == 3


def test_dry_run_sends_nothing_and_tells_where_and_when(run, log):
    summary = run.execute(messages=rows(2), dry_run=True)
    assert run.transport.sent == []
    assert (summary["dry_run"], summary["sent"]) == (True, 2)
    assert "would send to mail: 2 at once" in log.text
    assert "due 2026-03-01T12:01:00+00:00 (in 0:01:00)" in log.text
    assert "body 0" not in log.text


def test_dry_run_counts_as_the_real_one_and_fixes_no_anchor(run):
    stale = [{"value": "old", "due_at": NOW - timedelta(hours=2)}]
    both = {"messages": [*rows(2), *rows(1), *stale], "past_due": "skip"}
    planned = run.execute(**both, dry_run=True)
    assert run.states == {}
    run.now += timedelta(days=2)
    run.execute(messages=rows(1))
    assert run.transport.sent[0].due_at == run.now + timedelta(seconds=60)
    run.now, run.states = NOW, States()
    assert run.execute(**both) | {"dry_run": True} == planned


def test_failed_send_says_what_was_confirmed(run, log):
    run.transport.fail_after = 2
    with pytest.raises(SendFailed, match="confirmed 2 messages and not 1"):
        run.execute(messages=rows(3))
    assert "confirmed: 2 sent, 0 stored" in log.text
    assert run.transport.closed == 1


def test_nothing_to_send(run, log):
    assert run.execute(messages=[])["sent"] == 0
    assert "there is nothing to send" in log.text
    with pytest.raises(AirflowFailException, match="on_empty="):
        run.execute(messages=[], on_empty="fail")
    with pytest.raises(AirflowSkipException):
        run.execute(messages=[], on_empty="skip")


def test_body_is_no_template_field_and_in_no_log_line(run, log):
    task = run.task(value="secret {{ 1 + 1 }}", delay=5)
    assert not {"value", "body", "messages"} & set(task.template_fields)
    run.execute(value="secret {{ 1 + 1 }}", delay=5)
    assert run.transport.sent[0].body == b"secret 2"
    assert "secret" not in log.text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"value": "x", "delay": 1, "headers": ["a"]}, "headers: must be a dictionary of text to text"),
        ({"value": "x", "delay": 1, "headers": {"a": 1}}, "headers: must be a dictionary of text to text"),
        ({"value": "x", "delay": 1, "message_id": "None"}, "message_id= is 'None'; did its template"),
        ({"value": "x", "delay": "soon"}, "'soon' is neither a number of seconds nor an ISO 8601 duration"),
        ({"value": "x", "delay": "P1Y"}, "'P1Y' has months or years"),
        ({"value": "x", "due_at": "2026-03-01T12:00:00"}, "has no time zone"),
        ({"value": "x", "due_at": "0001-01-01T00:00:00", "timezone": "Europe/Berlin"}, "outside the years"),
        ({"value": "x", "delay": 1, "timezone": "Mars"}, "IANA"),
        ({"messages": None, "source": ""}, "source= is ''; did its template render"),
        ({"value": "x"}, "no column due_at or delay_seconds"),
        ({"value": 5, "delay": 1}, "parameters row 1, column value: must be text"),
    ],
)
def test_bad_parameter_is_named_before_anything_is_sent(run, arguments, says):
    with pytest.raises(AirflowFailException) as caught:
        run.execute(**arguments)
    assert says in str(caught.value)
    assert run.transport.sent == []


def test_columns_of_another_name_are_read_and_corrected_rejects_read_again(run, tmp_path):
    rows = [
        {"text": "a", "remind_at": NOW + timedelta(hours=1), "customer_id": "c1", "price": 1},
        {"text": "b", "remind_at": NOW + timedelta(hours=1), "customer_id": "", "price": 1},
    ]
    arguments = {
        "columns": {"value": "text", "due_at": "remind_at", "tag": "customer_id"},
        "id_columns": ["customer_id"],
        "rejects": str(tmp_path / "rejects.jsonl"),
    }
    expected = r"unknown columns customer_id, price, remind_at(, text)? .* pass columns="
    with pytest.raises(AirflowFailException, match=expected):
        run.execute(messages=rows)
    assert run.execute(messages=rows, **arguments)["sent"] == 1
    [message] = run.transport.sent
    assert (message.body, message.tag, message.message_id) == (b"a", "c1", key_id(("customer_id",), ("c1",)))
    row = json.loads((tmp_path / "rejects.jsonl").read_text())
    assert row["rejected"]["column"] == "customer_id (tag)"
    mended = tmp_path / "mended.jsonl"
    mended.write_text(json.dumps({**row, "customer_id": "c2"}))
    assert run.execute(source=str(mended), **arguments)["sent"] == 1
    assert run.transport.sent[1].tag == "c2"


def test_timezone_takes_naive_times_and_counts_shifts(run, log):
    run.execute(messages=[{"value": "x", "due_at": "2026-03-29T02:30:00"}], timezone="Europe/Berlin")
    assert run.transport.sent[0].due_at == datetime(2026, 3, 29, 1, 30, tzinfo=UTC)
    assert "1 local times that a gap skips" in log.text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "give one of messages="),
        ({"value": "x", "messages": []}, "give one of messages="),
        ({"value": "x", "delay": 1, "due_at": NOW}, "say the same thing"),
        ({"messages": [], "message_id": "x"}, "names one message"),
        ({"value": "x", "id_columns": ["a"]}, "names columns"),
        ({"messages": [], "id_columns": []}, "is empty"),
        ({"messages": [], "columns": {"text": "value"}}, "columns= has text, and its keys are our names"),
        ({"value": "x", "columns": {"tag": "a"}}, "columns= names columns of messages= or source="),
        ({"source": ParquetSource("rows", columns={}), "columns": {}}, "columns= is given to the source and to the"),
        ({"value": "x", "past_due": "maybe"}, "past_due='maybe' is none of 'fail', 'send', 'skip'"),
        ({"value": "x", "hold_over": 5}, "timedelta"),
        ({"value": "x", "max_past": timedelta(seconds=-1)}, "not negative"),
    ],
)
def test_contradiction_is_an_error_when_the_dag_is_parsed(run, arguments, says):
    with pytest.raises(ValueError, match=says):
        run.task(**arguments)


@pytest.mark.parametrize("parquet", [False, True])
@pytest.mark.parametrize("count", [1, 100, 101])
def test_the_ids_of_up_to_100_messages_are_in_the_result(run, tmp_path, count, parquet):
    if parquet:
        path = tmp_path / "rows.parquet"
        pq.write_table(pa.Table.from_pylist(rows(count)), path)
        summary = run.execute(source=str(path))
    else:
        summary = run.execute(messages=rows(count))
    assert summary["message_ids"] == (run.ids() if count <= 100 else None)


def test_ids_of_copies_are_named_once_and_those_that_are_not_sent_are_not(run):
    late = {"value": "late", "due_at": (NOW - timedelta(days=1)).isoformat()}
    summary = run.execute(messages=[*rows(2), *rows(1), late], past_due="skip")
    assert summary["message_ids"] == run.ids()
    assert len(run.ids()) == 2
