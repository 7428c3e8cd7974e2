"""Columns and options of the data source, without Spark at work."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

import pyspark_delayed
from airflow_delayed.errors import DelayedError, InputError
from airflow_delayed.identity import Origin, scope_of
from airflow_delayed.spark.connections import route_of
from airflow_delayed.spark.options import BATCH_ROWS, NAMES, settings_of
from airflow_delayed.spark.sink import DelayedDataSource

TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
#: Spark's own reader of such text needs its JVM.
TYPES = {
    "string": StringType(),
    "binary": BinaryType(),
    "timestamp": TimestampType(),
    "timestamp_ntz": TimestampNTZType(),
    "bigint": LongType(),
    "map<string,string>": MapType(StringType(), StringType()),
    "map<string,int>": MapType(StringType(), IntegerType()),
    "array<int>": ArrayType(IntegerType()),
}
SCHEMA = "message_id string, destination string, value string, due_at timestamp, headers map<string,string>, tag string"
NOW = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)
ORIGIN = '{"dag_id": "d", "run_id": "r", "task_id": "t"}'
CONNECTIONS = {
    "broker": {"conn_type": "rabbitmq", "host": "nowhere.invalid"},
    "aws": {"conn_type": "aws", "extra": {"region_name": "eu-west-1"}},
    "role": {"conn_type": "aws", "extra": {"role_arn": "arn:aws:iam::1:role/r"}},
    "db": {"conn_type": "sqlite", "host": "/nowhere/store.db"},
    "http": {"conn_type": "http", "host": "nowhere.invalid"},
}


def writer(tmp_path: Path, schema: str = SCHEMA, overwrite: bool = False, **options: str):
    file = tmp_path / "connections.json"
    file.write_text(json.dumps(CONNECTIONS))
    all_options = {"deliver": "broker", "connections_file": str(file), **options}
    return DelayedDataSource(all_options).writer(struct(schema), overwrite)


def struct(text: str) -> StructType:
    made = StructType()
    for name, kind in (column.split() for column in text.split(", ")):
        made.add(name, TYPES[kind])
    return made


def test_spark_finds_the_format_by_the_name_of_a_module() -> None:
    assert pyspark_delayed.DefaultSource is DelayedDataSource
    assert DelayedDataSource.name() == "delayed"


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (f"{SCHEMA}, colour string", "unknown columns colour"),
        (SCHEMA.replace("value string, ", ""), "no column value"),
        (f"{SCHEMA}, body binary", "both value and body"),
        (SCHEMA.replace("destination string, ", ""), "no column destination"),
        (SCHEMA.replace("due_at timestamp", "due_at string"), "must be a timestamp; in Spark to_timestamp(due_at)"),
        (SCHEMA.replace("due_at timestamp", "due_at bigint"), "due_at is bigint, and must be a timestamp; in Spark"),
        (SCHEMA.replace("due_at timestamp", "due_at timestamp_ntz"), "its wall clock is read by the option timezone"),
        (SCHEMA.replace("map<string,string>", "map<string,int>"), "column headers is map<string,int>, and must be"),
        (SCHEMA.replace("value string", "value array<int>"), "column value is array<int>, and must be text or binary"),
        (f"{SCHEMA}, tag string", "more than one column tag"),
        (f"{SCHEMA}, delay_seconds string", "column delay_seconds is string, and must be a number"),
    ],
)
def test_columns_that_cannot_be(tmp_path: Path, schema: str, problem: str) -> None:
    with pytest.raises(InputError) as caught:
        writer(tmp_path, schema)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"colour": "red"}, "unknown options colour; known are deliver, "),
        ({"deliver": ""}, "the option deliver is missing"),
        ({"id_columns": "tag"}, "a column message_id, and id_columns= too"),
        ({"past_due": "perhaps"}, "none of 'fail', 'send', 'skip'"),
        ({"dry_run": "perhaps"}, "none of 'false', 'true'"),
        ({"window": "0"}, "the option window cannot be read: it must be a whole number, 1 or more"),
        ({"hold_over": "a while"}, "the option hold_over cannot be read: it must be a number of seconds"),
        ({"delay": "60", "due_at": "2026-01-31T12:00:00Z"}, "say the same thing"),
        ({"until_due": "true"}, "give the option store, and no hold_over"),
        ({"until_due": "true", "store": "db", "hold_over": "5"}, "give the option store, and no hold_over"),
        ({"headers": "{}", "headers_file": "h"}, "say the same thing"),
        ({"headers": "hush"}, "the option headers cannot be read: it must be a JSON object"),
        ({"headers": '{"a": {"hush": 1}}'}, "the option headers cannot be read: it must be a JSON object"),
        ({"anchor": "2026-01-01T00:00:00"}, "has no time zone"),
        ({"timezone": "Nowhere"}, "is not an IANA time zone"),
        ({"scope": "[1.5]"}, "the option scope cannot be read"),
        ({"origin": "nightly"}, "the option origin cannot be read: it must be a JSON object"),
        ({"origin": '["d", "r", "t"]'}, "the option origin cannot be read: it must be a JSON object"),
        ({"origin": '{"dag_id": "d", "run_id": "r"}'}, "the option origin cannot be read: it must be a JSON object"),
        ({"origin": ORIGIN.replace("}", ', "try": 1}')}, "the option origin cannot be read: it must be a JSON object"),
        ({"origin": ORIGIN.replace('"t"', "1")}, "the option origin cannot be read: it must be a JSON object"),
        ({"origin": ORIGIN.replace('"t"', '""')}, "the option origin cannot be read: it must be a JSON object"),
        ({"store": "broker"}, "name one connection"),
        ({"traceparent": "00-1-1-01"}, "the option traceparent cannot be read: it must be a traceparent of W3C"),
        ({**TRACE, "tracestate": "a=\n"}, "the option tracestate cannot be read: it must be 1 to 512 printable"),
        ({"store": "db", "envelope": "raw"}, "envelope cannot go with store"),
        ({"on_conflict": "perhaps"}, "none of 'error', 'keep', 'replace'"),
        # what the connections' types do not allow
        ({"envelope": "nservicebus"}, "has no envelope"),
        ({"on_conflict": "keep"}, "has no on_conflict"),
        ({"deliver": "aws", "window": "10"}, "has no window"),
        ({"deliver": "db", "store": "aws"}, "stores its messages itself; leave the option store out"),
        ({"store": "aws"}, "'aws' is of type 'aws', which no transport serves"),
        ({"deliver": "http"}, "'http' is of type 'http', which no transport serves"),
        ({"deliver": "role"}, "takes on a role, which is not done here"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, options: dict[str, str], problem: str) -> None:
    with pytest.raises(DelayedError) as caught:
        writer(tmp_path, **options)
    assert problem in str(caught.value)
    assert "hush" not in str(caught.value)


def test_what_was_sent_cannot_be_overwritten(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"use mode\('append'\)"):
        writer(tmp_path, overwrite=True)


def test_the_driver_need_not_know_the_connections(tmp_path: Path) -> None:
    assert writer(tmp_path, deliver="only_the_executors_know_it") is not None


def test_columns_that_mean_nothing_may_be_ignored_or_be_the_key(tmp_path: Path) -> None:
    without_id = SCHEMA.replace("message_id string, ", "") + ", customer string, colour string"
    assert writer(tmp_path, without_id, id_columns="customer", columns="{}") is not None


RENAMED = json.dumps({"value": "text", "due_at": "remind_at", "tag": "customer_id"})


def test_columns_of_another_name(tmp_path: Path) -> None:
    schema = "destination string, text string, remind_at timestamp, customer_id string, colour string"
    assert writer(tmp_path, schema, columns=RENAMED, id_columns="customer_id") is not None


@pytest.mark.parametrize(
    ("schema", "columns", "problem"),
    [
        (
            "destination string, text string, remind_at timestamp",
            RENAMED,
            "no column customer_id (tag), which columns=",
        ),
        (
            "destination string, text string, remind_at string, customer_id string",
            RENAMED,
            "column remind_at (due_at) is string, and must be a timestamp; in Spark to_timestamp(remind_at) makes one",
        ),
        (
            SCHEMA,
            '{"text": "value"}',
            "the option columns cannot be read: columns= has text, and its keys are our names",
        ),
        (SCHEMA, "text", "the option columns cannot be read"),
        (SCHEMA, "null", "the option columns cannot be read: columns= must be a dictionary"),
        (SCHEMA + ", colour string", "", "unknown columns colour"),
    ],
)
def test_columns_that_the_dataframe_lacks_or_a_message_has_not(
    tmp_path: Path, schema: str, columns: str, problem: str
) -> None:
    with pytest.raises(InputError) as caught:
        writer(tmp_path, schema, columns=columns)
    assert problem in str(caught.value)


def test_what_is_not_given() -> None:
    settings = settings_of({"deliver": "broker", "destination": " "}, NOW)
    assert settings.rules.anchor == NOW
    assert settings.rules.scope == b""
    assert (settings.oldest, settings.hold_over) == (NOW - timedelta(hours=1), timedelta(minutes=15))
    assert (settings.batch_rows, settings.window, settings.connections) == (BATCH_ROWS, None, None)
    assert (settings.wanted.destination, settings.past_due, settings.dry_run) == (False, "fail", False)


def test_no_time_at_all_is_a_time_too() -> None:
    settings = settings_of({"deliver": "broker", "hold_over": "0", "max_past": "0", "delay": "0"}, NOW)
    assert (settings.hold_over, settings.oldest, settings.rules.due_at) == (timedelta(0), NOW, NOW)


def test_relative_delays_count_from_the_anchor() -> None:
    settings = settings_of({"deliver": "b", "delay": "90", "anchor": "2026-01-31T13:00:00+01:00"}, NOW + timedelta(1))
    assert settings.rules.due_at == NOW + timedelta(seconds=90)
    assert settings.rules.anchor == NOW
    spans = settings_of(
        {"deliver": "b", "delay": "PT1M", "hold_over": "PT10M", "max_past": "P1D", "spread": "PT5M"}, NOW
    )
    assert spans.rules.spread == timedelta(minutes=5)
    assert (spans.rules.due_at, spans.hold_over) == (NOW + timedelta(minutes=1), timedelta(minutes=10))
    assert spans.oldest == NOW - timedelta(days=1)


def test_scopes() -> None:
    assert settings_of({"deliver": "b", "scope": "nightly"}, NOW).rules.scope == scope_of("nightly")
    wanted = scope_of("dag", "run", "task", -1)
    assert settings_of({"deliver": "b", "scope": '["dag", "run", "task", -1]'}, NOW).rules.scope == wanted


def test_the_trace_that_all_messages_carry(tmp_path: Path) -> None:
    given = {"deliver": "broker", "store": "db", "connections_file": str(tmp_path / "c.json")}
    (tmp_path / "c.json").write_text(json.dumps(CONNECTIONS))
    for trace in (TRACE, TRACE | {"tracestate": "vendor=1"}, {}):
        for options in (given, {name: given[name] for name in given if name != "store"}, {**given, "deliver": "aws"}):
            settings = settings_of({**options, **trace}, NOW)
            assert route_of(settings, clock=lambda: NOW).trace == settings.trace == trace
    assert settings_of({"deliver": "broker", "tracestate": "vendor=1"}, NOW).trace == {}


def test_whose_run_it_is() -> None:
    origin = Origin(dag_id="d", run_id="r", task_id="t")
    assert settings_of({"deliver": "b", "origin": ORIGIN}, NOW).origin == origin
    mapped = settings_of({"deliver": "b", "origin": ORIGIN.replace("}", ', "map_index": 3}')}, NOW).origin
    assert mapped == replace(origin, map_index=3)
    assert settings_of({"deliver": "b"}, NOW).origin is None


def test_every_option_is_described() -> None:
    text = DelayedDataSource.__doc__
    assert text is not None
    assert [name for name in NAMES if f"``{name}``" not in text] == []
