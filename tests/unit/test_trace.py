"""The trace that messages carry: what is active in the task, what ids and digests see of it (nothing), who wins."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState
from pika import BasicProperties
from support.recorder import Recorder

from airflow_delayed.delivery import SendReport
from airflow_delayed.identity import digest_of
from airflow_delayed.message import DelayedMessage
from airflow_delayed.rabbitmq.properties import MessagePropertiesWriter
from airflow_delayed.route import Route
from airflow_delayed.sqs.entries import MAX_BYTES, decode, direct, pack
from airflow_delayed.store.records import to_message, to_row
from airflow_delayed.trace import current_trace

NOW = datetime(2026, 1, 31, 8, tzinfo=timezone.utc)
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
START = "NServiceBus.OpenTelemetry.StartNewTrace"
TRACE = {"traceparent": PARENT, "tracestate": "vendor=1"}
LINKED = {**TRACE, START: "True"}
IDS = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331


def message(headers: dict[str, str] | None = None, **fields) -> DelayedMessage:
    due = NOW + timedelta(hours=9)
    return DelayedMessage(
        **{"destination": "mail", "body": b"{}", "due_at": due, "message_id": "m", "trace": LINKED, **fields},
        headers=headers or {},
    )


@contextmanager
def within(*, flags: int = 1, state: dict[str, str] | None = None) -> Iterator[None]:
    """A span of another process is active, as in a task whose Airflow has a tracer."""
    context = SpanContext(
        *IDS, is_remote=True, trace_flags=TraceFlags(flags), trace_state=TraceState((state or {}).items())
    )
    with trace.use_span(NonRecordingSpan(context)):
        yield


def test_the_active_span_is_read():
    assert current_trace() == {}
    with within(state={"vendor": "1"}):
        assert current_trace() == TRACE
    with within():
        assert current_trace() == {"traceparent": PARENT}, "an empty tracestate is left out"
    with within(state={f"v{number}": "x" * 200 for number in range(3)}):
        assert current_trace() == {"traceparent": PARENT}, "a tracestate of over 512 characters"


def test_a_context_that_no_tracer_made_is_not_passed_on(monkeypatch):
    """Airflow makes one for each task with otel_on = False."""
    with within(flags=0):
        assert current_trace() == {}
    # with a tracer, that a trace is not sampled is its decision, which consumers follow
    provider = TracerProvider(sampler=ALWAYS_OFF)
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    with provider.get_tracer("t").start_as_current_span("s"):
        assert not int(current_trace()["traceparent"][-2:], 16) & TraceFlags.SAMPLED


def test_nothing_is_imported_where_nothing_has_loaded_opentelemetry():
    program = (
        "import sys; import airflow_delayed.trace as t, airflow_delayed.route;"
        " assert t.current_trace() == {};"
        " print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"


def test_no_digest_and_no_comparison_sees_it():
    traced, other, plain = message(), message(trace={"traceparent": "00-0"}), message(trace={})
    assert traced == other == plain
    assert digest_of(traced) == digest_of(other) == digest_of(plain)
    assert to_row(traced, "broker")["Digest"] == to_row(plain, "broker")["Digest"]
    # a header that the user set is a part of the message
    assert digest_of(message({"traceparent": PARENT})) != digest_of(plain)
    assert PARENT not in repr(traced)


def test_a_route_marks_what_is_delayed_to_start_a_trace_of_its_own():
    broker = Recorder()
    due = message(trace={}, due_at=NOW)
    late = message(trace={}, message_id="late")
    Route(delivery=broker, trace=TRACE).publish([due, late], [], NOW, sent=SendReport(), stored=SendReport())
    assert [one.trace for one in broker.sent] == [TRACE, LINKED]
    assert broker.sent == [due, late]


def test_the_store_keeps_it_beside_the_headers():
    for headers in ({}, {"a": "b"}, {"traceparent": "mine"}):
        row = to_row(message(headers), "broker")
        found = to_message({**row, "BodyBytes": 2, "HeadersBytes": 2})
        assert (found.headers, found.trace) == (headers, LINKED)


def written(one: DelayedMessage, style) -> dict[str, str]:
    properties = MessagePropertiesWriter(style).properties(one, NOW, 9 * 3600)
    names = {*LINKED, "a"}
    found = BasicProperties().decode(b"".join(properties.encode())).headers
    return {name: value for name, value in found.items() if name in names}


def test_rabbitmq_writes_it():
    assert written(message({"a": "b"}), "plain") == {"a": "b", **TRACE}
    assert written(message({"a": "b"}), "nservicebus") == {"a": "b", **LINKED}
    assert written(message(trace=TRACE), "nservicebus") == TRACE
    assert written(message(trace={}), "nservicebus") == {}


@pytest.mark.parametrize("name", ["traceparent", "tracestate"])
def test_what_the_user_set_wins(name):
    mine = {name: "mine"}
    assert written(message(mine), "nservicebus") == written(message(mine), "plain") == mine
    for form in ("raw", "nservicebus", "nservicebus-unwrapped"):
        assert sent(message(mine), form) == mine
    assert written(message({START: "False"}), "nservicebus") == {**TRACE, START: "False"}


def sent(one: DelayedMessage, form: str) -> dict[str, str]:
    parcel = pack(one, form)
    entry = direct(parcel.body, parcel.attributes, 900)
    assert len(entry["MessageAttributes"]) <= 8
    received = {"Body": entry["MessageBody"], "MessageAttributes": entry["MessageAttributes"], "MessageId": "x"}
    return {name: value for name, value in decode(received).headers.items() if name != "NServiceBus.DeliverAt"}


def test_sqs_writes_it():
    assert sent(message({"a": "b"}), "raw") == {"a": "b", **TRACE}
    for form in ("nservicebus", "nservicebus-unwrapped"):
        assert sent(message({"a": "b"}), form) == {"a": "b", **LINKED}


@pytest.mark.parametrize("count", [4, 5, 6, 7])
def test_the_raw_form_stays_as_it_is(count):
    headers = {f"h{number}": "v" for number in range(count)}
    found = sent(message(headers), "raw")
    assert found == ({**headers, **TRACE} if count <= 4 else headers)
    # one attribute for each header, or one for all, as without a trace
    alone = "NServiceBus.AmazonSQS.Headers" not in pack(message(headers, trace={})).attributes
    assert alone == ("NServiceBus.AmazonSQS.Headers" not in pack(message(headers)).attributes) == (count <= 6)


def test_no_message_becomes_too_large_by_it():
    plain = pack(message(trace={}))
    full = message(body=b"x" * (MAX_BYTES - plain.size + 2))
    assert pack(replace(full, trace={})).size == pack(full).size == MAX_BYTES
    assert sent(full, "raw") == {}


def test_airflows_task_runner_makes_the_span_that_is_active(monkeypatch):
    """Its span stands in the trace of the DAG run; without a tracer, what it makes is not passed on."""
    from airflow.sdk.execution_time import task_runner

    names = {"dag_id": "d", "task_id": "send", "run_id": "r", "try_number": 1, "map_index": -1}
    startup = SimpleNamespace(ti=SimpleNamespace(**names, context_carrier={"traceparent": PARENT}))
    provider = TracerProvider()
    monkeypatch.setattr(task_runner, "tracer", provider.get_tracer("airflow"))
    with task_runner._make_task_span(startup) as span:
        assert span.name == "worker.send"
        assert current_trace()["traceparent"] == f"00-{IDS[0]:032x}-{span.get_span_context().span_id:016x}-01"
