"""A trace from a task to a consumer, over a store and a broker; a retry in another span means the same messages."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from types import SimpleNamespace

import pytest
from opentelemetry.propagate import extract
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import format_span_id, format_trace_id
from support.rabbitmq import VirtualHost
from support.send_runs import States
from support.sqs import World
from support.stores import Store, message

from airflow_delayed import hooks
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.message import utcnow
from airflow_delayed.operators.send import DelayedSendOperator

START = "NServiceBus.OpenTelemetry.StartNewTrace"
NAMES = {"dag_id": "d", "run_id": "r", "task_id": "send", "map_index": -1, "max_tries": 0, "try_number": 1}


class Spans:
    """A tracer, and what it exported."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._tracer = provider.get_tracer("tests")

    def span(self, name: str):
        return self._tracer.start_as_current_span(name)

    def consumed(self, headers: Mapping[str, str]) -> tuple[str, str]:
        """What a consumer's span has of its sender: the trace and the name of the span."""
        with self._tracer.start_as_current_span("consume", context=extract(headers)) as consumer:
            parent = consumer.parent
            trace_id = consumer.get_span_context().trace_id
        sender = {span.context.span_id: span.name for span in self._exporter.get_finished_spans()}
        print(
            f"trace {format_trace_id(trace_id)}: {sender[parent.span_id]} {format_span_id(parent.span_id)} -> consumer"
        )
        return format_trace_id(trace_id), sender[parent.span_id]


@pytest.fixture
def spans() -> Spans:
    return Spans()


def send(conn_id: str, rows: list[dict[str, object]], **options: object) -> dict[str, object]:
    ti = SimpleNamespace(**NAMES, xcom_push=lambda key, value: None)
    task = DelayedSendOperator(task_id="send", conn_id=conn_id, messages=rows, destination="mail", **options)
    return task.execute({"ti": ti, "task_state_store": States()})


def ids(span) -> str:
    return format_trace_id(span.get_span_context().trace_id)


def test_over_a_store_and_rabbitmq(store: Store, vhost: VirtualHost, spans: Spans, connect, monkeypatch):
    connect("broker", **vhost.connection_with(topology="nservicebus"))
    RabbitMQDelayHook("broker").install(["mail"], create_destinations=True)
    monkeypatch.setattr(
        hooks.store,
        "DelayedStoreHook",
        lambda conn_id, deliver_conn_id=None, **more: store.hook(deliver_conn_id, **more),
    )
    hook, due = store.installed(), utcnow() + timedelta(hours=1)
    rows = [{"message_id": name, "value": name, "due_at": due} for name in ("a", "mine")]
    rows[1]["headers"] = {"traceparent": "of the user"}
    arguments = {"store_conn_id": store.conn_id, "hold_over": timedelta(0)}
    with spans.span("send") as sender:
        assert send("broker", rows, **arguments)["stored"] == 2
    for on_conflict in ("error", "keep", "replace"):
        with spans.span("retry"):
            assert send("broker", rows, on_conflict=on_conflict, **arguments)["duplicates"] == 2
    assert send("broker", rows, **arguments)["duplicates"] == 2, "without a span"
    # what the page and the command line show
    assert hook.content("a", body_limit=0).headers.keys() == {"traceparent", START}

    with spans.span("dispatch"):
        store.dispatcher(
            hook,
            deliver_conn_ids=["broker"],
            database_time=lambda connection: due,
            transports=lambda conn_id, clock: RabbitMQDelayHook(conn_id, clock=clock),
        ).run()
    found = {one.message_id: one.properties.headers for one in vhost.collect("mail", enough=2)}
    assert spans.consumed(found["a"]) == (ids(sender), "send")
    assert found["a"][START] == "True"
    assert "tracestate" not in found["a"]
    assert found["mine"]["traceparent"] == "of the user"
    assert START not in found["mine"]


def test_straight_to_rabbitmq(vhost: VirtualHost, spans: Spans, connect):
    connect("broker", **vhost.connection)
    vhost.declare("mail")
    row = {"value": "a", "delay_seconds": 0}
    with spans.span("send") as sender:
        send("broker", [{**row, "message_id": "on"}])
    send("broker", [{**row, "message_id": "off"}])
    found = {one.message_id: one.properties.headers for one in vhost.collect("mail", enough=2)}
    assert spans.consumed(found["on"]) == (ids(sender), "send")
    assert START not in found["on"]
    assert "traceparent" not in found["off"]


@pytest.mark.parametrize("form", ["raw", "nservicebus", "nservicebus-unwrapped"])
def test_to_sqs(world: World, spans: Spans, form):
    world.install()
    with spans.span("send") as sender:
        send(world.conn_id, [{"value": "a", "delay_seconds": 1, "destination": world.destination}], envelope=form)
    found = []
    while not found:
        found = world.arrived()
    assert spans.consumed(found[0].headers) == (ids(sender), "send")
    assert (START in found[0].headers) == (form != "raw")


def test_a_row_of_a_queue_table_is_the_same_whatever_its_trace(store: Store):
    """As after a commit in doubt: the row is there, and its message comes again."""
    hook = store.installed("mail", deliver_conn_id=None)
    for number, trace in enumerate([{"traceparent": "one"}, {"traceparent": "two"}, {}]):
        hook.send([message("a", hook.now(), destination="mail", trace=trace)])
        report = store.dispatcher(hook).run()
        assert report.dispatched == 1, number
        store.sql(hook, f'DELETE FROM {{s}}"{hook.tables.past.name}"')
    [(headers, _)] = store.rows(hook, "mail")
    assert '"traceparent":"one"' in headers
