"""DelayedSparkSendOperator's arguments and what the job is told, without Spark."""

from __future__ import annotations

import json
import runpy
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import pytest
from airflow.sdk import DAG, Asset
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException
from airflow.sdk.execution_time.context import OutletEventAccessors
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span
from support import statsd
from support.recorder import Recorder
from support.send_runs import States, deliver_by
from support.statsd import Told
from support.times import by_clock

from airflow_delayed import compat, lineage
from airflow_delayed.delivery import Connection, TopologyReport
from airflow_delayed.errors import DelayedError, InputError, TransportUnavailable
from airflow_delayed.identity import Origin
from airflow_delayed.lineage import Dataset
from airflow_delayed.operators.spark import DelayedSparkSendOperator
from airflow_delayed.operators.spark_connections import spark_connections_file, spark_environment
from airflow_delayed.spark.connections import route_of
from airflow_delayed.spark.options import settings_of

NOW = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)
MINIMAL = {"task_id": "send", "conn_id": "broker", "source": "s3a://b/rows"}
SUMMARY = {"rows": 3, "sent": 1, "stored": 2, "replaced": 0, "duplicates": 0}


def context() -> dict:
    ti = SimpleNamespace(
        dag_id="d",
        run_id="r",
        task_id="send",
        map_index=2,
        max_tries=0,
        try_number=1,
        xcom_push=lambda key, value: None,
    )
    return {"ti": ti, "task_state_store": States(), "outlet_events": OutletEventAccessors()}


class Hook:
    """Takes the job, in place of spark-submit, and writes a manifest as the job would."""

    _should_track_driver_status = _is_yarn_cluster_mode = False

    def __init__(self, operator: DelayedSparkSendOperator, summary: dict | None) -> None:
        self.operator = operator
        self.summary = summary

    def _should_track_driver_via_k8s_api(self) -> bool:
        return False

    def submit(self, application: str) -> None:
        self.application = application
        self.args = runpy.run_path(application)["arguments"](self.operator.application_args)
        self.files = [Path(file) for file in self.operator.files.split(",")] if self.operator.files else []
        own = [file for file in self.files if file.exists()]
        self.texts = [file.read_text() for file in own]
        self.modes = [file.stat().st_mode & 0o777 for file in own]
        options = dict(self.args.set)
        if self.summary is not None:
            manifest = {"version": 1, "summary": self.summary, "partitions": 1, "repeated": 0, "other_attempts": None}
            Path(options["manifest"]).write_text(json.dumps({**manifest, "destinations": {"mail": 3}}))


class Named(Recorder):
    """A transport that OpenLineage has names for."""

    def dataset(self, destination: str) -> Dataset:
        return Dataset(self.conn_id, destination)

    def own_dataset(self) -> Dataset:
        return Dataset(self.conn_id, "its table")


@pytest.fixture
def broker() -> Recorder:
    return Named("broker")


@pytest.fixture
def store() -> Recorder:
    return Named("db", destinations=())


@pytest.fixture
def run(connect, broker: Recorder, store: Recorder, monkeypatch: pytest.MonkeyPatch):
    connect("broker", conn_type="rabbitmq", host="nowhere.invalid", password='hu"sh', extra={"keyfile": "/k"})
    connect("db", conn_type="sqlite", host="/nowhere/store.db")

    deliver_by(monkeypatch, lambda conn_id, **options: broker, lambda *conn_ids, **options: store)

    def execute(summary: dict | None = SUMMARY, task_context: dict | None = None, **arguments):
        clock = arguments.pop("clock", lambda: NOW)
        operator = by_clock(DelayedSparkSendOperator(**{**MINIMAL, **arguments}), clock)
        hook = operator._hook = Hook(operator, summary)
        return operator.execute(task_context or context()), hook

    return execute


def test_a_worker_without_spark(run, connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    connect("spark_default", conn_type="spark", host="local[1]")
    monkeypatch.setenv("PATH", str(tmp_path))
    operator = by_clock(DelayedSparkSendOperator(**MINIMAL), lambda: NOW)
    with pytest.raises(DelayedError, match=r"this worker, which has no spark-submit: pip install '[a-z-]*\[pyspark\]'"):
        operator.execute(context())


def test_the_job_gets_what_the_arguments_say(run) -> None:
    result, hook = run(
        destination="mail",
        store_conn_id="db",
        hold_over=timedelta(minutes=10),
        headers={"a": "b=c"},
        id_columns=["x", "y"],
        columns={"value": "text", "tag": "x"},
        source_format="csv",
        source_schema="a string",
        source_options={"header": "true"},
        query="SELECT '=' FROM source",
        partitions=4,
        check_first=True,
        connections_per_executor=2,
        window=10,
        past_due="skip",
        on_conflict="keep",
    )
    assert result == SUMMARY
    args = hook.args
    assert (args.source, args.format, args.schema, args.read) == (
        "s3a://b/rows",
        "csv",
        "a string",
        [("header", "true")],
    )
    assert (args.query, args.partitions, args.check_first) == ("SELECT '=' FROM source", 4, True)
    settings = settings_of(dict(args.set), NOW + timedelta(days=1))
    assert (settings.deliver, settings.store, settings.hold_over) == ("broker", "db", timedelta(minutes=10))
    folder = dict(zip([file.name for file in hook.files], hook.texts, strict=True))
    assert json.loads(folder[settings.headers_file]) == {"a": "b=c"}
    assert settings.rules.id_columns == ("x", "y")
    assert settings.rules.columns == settings.wanted.columns == {"value": "text", "tag": "x"}
    assert (settings.rules.anchor, settings.rules.destination) == (NOW, "mail")
    assert (settings.connections, settings.window, settings.past_due, settings.on_conflict) == (2, 10, "skip", "keep")
    assert dict(args.set)["scope"] == '["d", "r", "send", 2]'
    assert settings.origin == Origin(dag_id="d", run_id="r", task_id="send", map_index=2)


def test_the_job_gets_the_trace_of_the_task(run) -> None:
    context = SpanContext(1, 2, is_remote=True, trace_flags=TraceFlags(1))
    with use_span(NonRecordingSpan(context)):
        _, traced = run()
    _, off = run()
    assert settings_of(dict(traced.args.set), NOW).trace == {"traceparent": f"00-{1:032x}-{2:016x}-01"}
    assert settings_of(dict(off.args.set), NOW).trace == {}
    # ids are made of the scope
    assert dict(traced.args.set)["scope"] == dict(off.args.set)["scope"]


def test_connections_go_as_a_file_that_only_this_user_may_read(run) -> None:
    _, hook = run(store_conn_id="db")
    assert hook.modes == [0o600]
    assert not hook.files[0].exists()
    assert dict(hook.args.set)["connections_file"] == hook.files[0].name
    known = json.loads(hook.texts[0])
    assert known["broker"]["password"] == 'hu"sh'
    assert known["db"] == {"conn_type": "sqlite", "host": "/nowhere/store.db"}
    # as it is, or as JSON writes it; less of it may be in the random name of a folder
    words = " ".join(hook.operator.application_args)
    assert 'hu"sh' not in words
    assert 'hu\\"sh' not in words
    _, hook = run(connections="cluster", files="mine.txt")
    assert (hook.operator.files, "connections_file" in dict(hook.args.set)) == ("mine.txt", False)
    _, hook = run(connections="cluster")
    assert (hook.files, "connections_file" in dict(hook.args.set)) == ([], False)


@pytest.mark.parametrize("connections", ["file", "cluster"])
def test_the_values_of_headers_are_on_no_command_line(run, connections: str) -> None:
    _, hook = run(headers={"authorization": "Bearer hush"}, connections=connections)
    assert "hush" not in " ".join(hook.operator.application_args)
    assert (hook.texts[-1], hook.modes[-1]) == ('{"authorization": "Bearer hush"}', 0o600)
    assert dict(hook.args.set)["headers_file"] == hook.files[-1].name
    assert not hook.files[-1].exists()


def test_a_retry_means_the_same(run) -> None:
    task_context = context()
    with pytest.raises(DelayedError):
        run(task_context=task_context, summary=None)
    task_context["ti"].try_number = 2
    _, again = run(task_context=task_context, clock=lambda: NOW + timedelta(hours=1))
    options = dict(again.args.set)
    assert options["anchor"] == options["began"] == NOW.isoformat()


def test_a_task_that_is_cleared_a_month_after_it_succeeded_finds_its_rows_past_due(run) -> None:
    task_context, later = context(), NOW + timedelta(days=31)
    run(task_context=task_context)
    task_context["ti"].try_number, task_context["ti"].max_tries = 2, 1
    _, again = run(task_context=task_context, clock=lambda: later)
    options = dict(again.args.set)
    # ids are made from the anchor, and stay
    assert (options["anchor"], options["began"]) == (NOW.isoformat(), later.isoformat())
    assert settings_of(options, later).oldest == later - timedelta(hours=1)


def test_a_worker_lost_after_the_job_does_not_run_it_again(run) -> None:
    asset, task_context = Asset("reminders"), context()
    first, _ = run(task_context=task_context)
    task_context["ti"].try_number = 2
    again, hook = run(task_context=task_context, outlets=[asset])
    assert (again, hasattr(hook, "application")) == (first, False)
    # what the lost try did not get to say
    assert task_context["outlet_events"][asset].extra["destinations"] == {"mail": 3}
    # who clears it wants it sent
    task_context["ti"].try_number, task_context["ti"].max_tries = 3, 2
    _, hook = run(task_context=task_context)
    assert hasattr(hook, "application")


def test_a_clear_that_forgets_skips_no_rows(run, monkeypatch) -> None:
    monkeypatch.setattr(compat, "CLEAR_DELETES_STATE", True)
    task_context = context()
    task_context["ti"].try_number, task_context["ti"].max_tries = 2, 1
    with pytest.raises(AirflowFailException, match="past_due='skip' could skip rows"):
        run(task_context=task_context, past_due="skip")
    _, hook = run(task_context=task_context)
    assert settings_of(dict(hook.args.set), NOW).rules.anchor is None


def test_an_airflow_that_keeps_nothing_refuses_relative_delays_in_a_later_try(run) -> None:
    task_context = context()
    task_context["task_state_store"] = None
    task_context["ti"].try_number = 2
    _, hook = run(task_context=task_context)
    settings = settings_of(dict(hook.args.set), NOW)
    assert settings.rules.anchor is None
    with pytest.raises(InputError, match="delay_from="):
        settings_of({**dict(hook.args.set), "delay": "60"}, NOW)
    _, hook = run(task_context=task_context, delay_from=NOW, delay=60)
    assert settings_of(dict(hook.args.set), NOW).rules.due_at == NOW + timedelta(seconds=60)


def test_what_stays_until_it_is_due_stays_in_the_executors_store(run) -> None:
    _, hook = run(store_conn_id="db", until_due=True)
    settings = settings_of(dict(hook.args.set), NOW)
    assert (settings.until_due, settings.hold_over) == (True, timedelta(0))
    route = route_of(settings, clock=lambda: NOW, find=find_as({"broker": "rabbitmq", "db": "sqlite"}))
    assert (route.store.until_due, route.hold_over) == (True, timedelta(0))
    # a store that delivers itself has no other in front of it
    _, hook = run(conn_id="db", store_conn_id="db", until_due=True)
    assert not {"store", "until_due"} & dict(hook.args.set).keys()
    with pytest.raises(ValueError, match="until_due=True needs a store"):
        run(until_due=True)


def find_as(types):
    return lambda conn_id, file: Connection(conn_id=conn_id, conn_type=types[conn_id], host="127.0.0.1")


def test_durations_reach_spark_in_seconds(run) -> None:
    _, hook = run(delay="P1DT1S", hold_over="PT10M", max_past="P1W", spread="PT5M")
    given = {name: dict(hook.args.set)[name] for name in ("delay", "hold_over", "max_past", "spread")}
    wanted = {"delay": "86401.000000", "hold_over": "600.000000", "max_past": "604800.000000", "spread": "300.000000"}
    assert given == wanted
    with pytest.raises(AirflowFailException, match="'P1M' has months or years"):
        run(delay="P1M")


def test_the_event_and_the_empty(run) -> None:
    asset = Asset("reminders")
    task_context = context()
    run(task_context=task_context, outlets=[asset])
    extra = task_context["outlet_events"][asset].extra
    assert (extra["conn_id"], extra["stored"], extra["destinations"]) == ("broker", 2, {"mail": 3})
    empty = {**dict.fromkeys(SUMMARY, 0), "rows": 7}
    assert run(summary=empty)[0] == empty
    with pytest.raises(AirflowFailException, match="nothing to send: 7 rows were read"):
        run(summary=empty, on_empty="fail")
    with pytest.raises(AirflowSkipException):
        run(summary=empty, on_empty="skip")


def test_what_cannot_be_seen_from_here_is_no_error(run, broker, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def away(destinations, max_delay=None):
        raise TransportUnavailable("connection 'broker': no route")

    monkeypatch.setattr(broker, "verify", away)
    assert run()[0] == SUMMARY
    assert "from here it cannot be seen whether all is ready: connection 'broker': no route" in capsys.readouterr().out


def test_no_more_is_asked_of_the_broker_than_it_gets(run, broker, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(broker, "verify", lambda _, max_delay=None: asked.append(max_delay) or TopologyReport())
    # SQS's: what is due later waits in the store, whatever hold_over says
    broker.horizon = timedelta(seconds=870)
    run(store_conn_id="db", hold_over=timedelta(hours=1))
    run(store_conn_id="db", hold_over=timedelta(minutes=10))
    run()
    assert asked == [timedelta(seconds=870), timedelta(minutes=10), None]


def test_what_does_not_go_together_is_told_before_spark_starts(run, broker) -> None:
    with pytest.raises(AirflowFailException, match="envelope= cannot go with store_conn_id="):
        run(store_conn_id="db", envelope="raw", summary=None)
    # a template came out empty
    assert run(store_conn_id="", envelope="raw")[0] == SUMMARY
    broker.horizon = timedelta(0)
    with pytest.raises(AirflowFailException, match="itself: leave store_conn_id='db' out; or, where"):
        run(store_conn_id="db", summary=None)


def test_it_leads_to_the_messages_that_it_left_in_a_store(run, broker) -> None:
    def stores(operator: DelayedSparkSendOperator) -> list[str]:
        (link,) = operator.operator_extra_links
        text = link.get_link(operator, ti_key=context()["ti"])
        assert not text or text.endswith("&dag_id=d&run_id=r&task_id=send&map_index=2")
        return parse_qs(urlsplit(text).query).get("store", [])

    assert stores(run(store_conn_id="db")[1].operator) == ["db"]
    assert stores(run()[1].operator) == []
    assert stores(run(store_conn_id="db", dry_run=True)[1].operator) == []
    # of a job that failed half-way too
    failed = by_clock(DelayedSparkSendOperator(**MINIMAL, store_conn_id="db"), lambda: NOW)
    failed._hook = Hook(failed, None)
    with pytest.raises(DelayedError, match="its counts are not at"):
        failed.execute(context())
    assert stores(failed) == ["db"]
    # queue tables
    broker.horizon = timedelta(0)
    assert stores(run()[1].operator) == ["broker"]


def test_what_was_sent_and_stored_is_counted(run) -> None:
    with statsd.listening() as server:
        run(store_conn_id="db", summary={**SUMMARY, "sent": 5, "stored": 7})
        run(store_conn_id="db", dry_run=True)
        counted = server.told()
    assert counted == [
        Told("delayed.sent", 5, "c", {"conn_id": "broker"}),
        Told("delayed.stored", 7, "c", {"conn_id": "broker", "store_conn_id": "db"}),
    ]


def test_openlineage_is_told_the_files_the_store_and_the_destinations(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage, "wanted", lambda: True)
    operator = run(store_conn_id="db")[1].operator
    assert operator._inputs == [Dataset("s3://b", "rows")]
    assert operator._outputs == [Dataset("db", "its table"), Dataset("broker", "mail")]
    # the store took nothing
    direct = run(store_conn_id="db", summary={**SUMMARY, "stored": 0})[1].operator
    assert direct._outputs == [Dataset("broker", "mail")]
    plan = run(store_conn_id="db", dry_run=True)[1].operator
    assert (plan._inputs, plan._outputs) == ((), ())
    # which files a table has, Spark itself tells
    assert run(source=None, table="shop.reminders")[1].operator._inputs == []


def test_a_store_that_nobody_comes_to_is_told_of(run, store, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    run(store_conn_id="db")
    assert "no dispatcher was there" not in capsys.readouterr().out
    monkeypatch.setattr(store, "last_seen", lambda: None)
    run(store_conn_id="db", summary={**SUMMARY, "stored": 0})
    run(store_conn_id="db", dry_run=True)
    assert "no dispatcher was there" not in capsys.readouterr().out
    run(store_conn_id="db")
    assert "2 messages are stored for connection 'broker', and no dispatcher was there" in capsys.readouterr().out


def test_what_an_airflow_url_says_of_its_connection_is_not_sparks(run) -> None:
    operator = DelayedSparkSendOperator(
        **MINIMAL, manifest="memory://conn_id@bucket/a.json", attempts="s3://conn_id@bucket/attempts"
    )
    hook = operator._hook = Hook(operator, None)
    with pytest.raises(DelayedError, match=r"its counts are not at memory://bucket/a\.json"):
        operator.execute(context())
    options = dict(hook.args.set)
    assert (options["manifest"], options["attempts"]) == ("memory://bucket/a.json", "s3://bucket/attempts")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"source": None}, "give table=, source=, query="),
        ({"table": "t"}, "give table=, source=, query="),
        ({"delay": 1, "due_at": "2026-01-01T00:00:00Z"}, "say the same thing"),
        ({"past_due": "perhaps"}, "past_due='perhaps' is none of"),
        ({"connections": "options"}, "connections='options' is none of 'file', 'cluster'"),
        ({"columns": {"text": "value"}}, "columns= has text, and its keys are our names"),
        ({"hold_over": 5}, "hold_over=5 must be a timedelta"),
        ({"partitions": 0}, "partitions=0 must be a whole number"),
        ({"on_conflict": "perhaps"}, "none of 'error'"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict, problem: str) -> None:
    with pytest.raises(ValueError, match=problem.replace("(", r"\(")):
        DelayedSparkSendOperator(**{**MINIMAL, **arguments})


SECRETS = [
    {"source_options": {"password": "hush"}},
    {"source_options": {"header": "true", "fs.s3a.secret.key": "hush"}},
    {"source_options": {"url": "jdbc:postgresql://host/db?user=me&password=hush"}},
    {"source_options": {"url": "jdbc:mysql://me:hush@host/db"}},
    {"source_options": {"connect": "Endpoint=sb://x;AccountKey=hush"}},
    {"source": "s3a://me:hush@bucket/rows"},
    {"source": "https://host/rows?sig=hush"},
    {"manifest": "sftp://me:hush@host/manifest.json"},
    {"attempts": "s3://me:hu/sh@bucket/attempts"},
]


@pytest.mark.parametrize("arguments", SECRETS)
def test_a_secret_that_would_be_shown_is_refused_with_a_way_out(run, arguments: dict) -> None:
    way = "command line and Airflow's UI would show it. Spark's own configuration has a place for it"
    with pytest.raises(ValueError, match=way) as caught:
        DelayedSparkSendOperator(**{**MINIMAL, **arguments})
    assert "hush" not in str(caught.value)
    # or as it was rendered
    operator = DelayedSparkSendOperator(**MINIMAL)
    for name, value in arguments.items():
        setattr(operator, name, value)
    hook = operator._hook = Hook(operator, SUMMARY)
    with pytest.raises(AirflowFailException, match=way):
        operator.execute(context())
    assert not hasattr(hook, "args")


def test_what_holds_no_secret_is_taken(run) -> None:
    options = {"header": "true", "keyspace": "shop", "user": "me", "url": "jdbc:postgresql://host/db", "sep": ";"}
    harmless = {
        "source_options": options,
        "source": "abfss://box@account/rows",
        "attempts": "s3://aws_default@bucket/a@b",
    }
    _, hook = run(**harmless)
    assert dict(hook.args.read) == options
    assert (hook.args.source, dict(hook.args.set)["attempts"]) == ("abfss://box@account/rows", "s3://bucket/a@b")


def test_it_can_be_expanded() -> None:
    with DAG("d"):
        mapped = DelayedSparkSendOperator.partial(task_id="send", conn_id="broker").expand(source=["a", "b"])
    assert mapped.operator_class is DelayedSparkSendOperator
    assert {"conn_id", "source", "query", "manifest", "conf"} <= {*mapped.template_fields}
    assert "application_args" not in mapped.template_fields


def test_environment_and_file(connect) -> None:
    connect("broker", conn_type="rabbitmq", host="h", password="hush", extra={"a": 1})
    (text,) = spark_environment(["broker"]).values()
    assert json.loads(text) == {"conn_type": "rabbitmq", "host": "h", "password": "hush", "extra": {"a": 1}}
    with spark_connections_file(["broker"]) as path:
        assert json.loads(Path(path).read_text()) == {"broker": json.loads(text)}
    assert not Path(path).parent.exists()
