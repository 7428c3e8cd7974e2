"""A stream's writer: what it refuses, and its batches in a store and before a broker, without Spark at work."""

from __future__ import annotations

import itertools
import json
import logging
import pickle
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from botocore.exceptions import ClientError
from pyspark import TaskContext
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import IntegerType, LongType, StringType, StructType, TimestampType
from support.stores import Transport

from airflow_delayed.delivery import DelayedDelivery, SendReport
from airflow_delayed.errors import DelayedError, InputError, SendFailed, UnsupportedColumns
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import utcnow
from airflow_delayed.route import Route
from airflow_delayed.spark import connections
from airflow_delayed.spark.options import settings_of
from airflow_delayed.spark.partition import PartitionCommit, PartitionFailed
from airflow_delayed.spark.sink import DelayedDataSource
from airflow_delayed.spark.stream import DelayedStreamWriter
from airflow_delayed.sqs.transport import SqsTransport

HOUR = timedelta(hours=1)
QUERY = "7d9c"
TIME = pa.timestamp("us", tz="UTC")
#: All that a stream has to name besides.
REQUIRED = {"deliver": "broker", "rejects": "/r", "past_due": "send"}


def schema(*names: str) -> StructType:
    kinds = {
        "due_at": TimestampType(),
        "clicked": TimestampType(),
        "delay_seconds": LongType(),
        "number": IntegerType(),
    }
    made = StructType()
    for name in names:
        made.add(name, kinds.get(name, StringType()))
    return made


def writer(*columns: str, overwrite: bool = False, **options: object) -> DelayedStreamWriter:
    given = {name: str(value) for name, value in ({**REQUIRED, **options}).items() if value is not None}
    columns = columns or ("value", "destination", "due_at")
    return DelayedDataSource(CaseInsensitiveDict(given)).streamWriter(schema(*columns), overwrite)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"rejects": None}, "a stream needs one of two options: rejects names a folder"),
        ({"invalid_rows": "fail"}, "a stream needs one of two options"),
        ({"past_due": None}, "a stream needs the option past_due"),
        ({"rejects": None, "invalid_rows": "fail", "past_due": "fail"}, "would fail a batch for ever"),
        ({"delay": "60"}, "the option delay needs delay_from"),
        ({"dry_run": "true", "scope": "x"}, "a stream has no scope or dry_run"),
        ({"anchor": "2026-01-01T00:00:00Z"}, "a stream has no anchor"),
        ({"began": "2026-01-01T00:00:00Z"}, "a stream has no began"),
        ({"delay_from": "clicked"}, "no column clicked, which delay_from names"),
        ({"max_future": "soon"}, "the option max_future cannot be read"),
        ({"colour": "red"}, "unknown options colour"),
    ],
)
def test_options_that_a_stream_cannot_have(options: dict[str, str | None], problem: str) -> None:
    with pytest.raises(InputError) as caught:
        writer(**options)
    assert problem in str(caught.value)


def test_columns_that_a_stream_cannot_have() -> None:
    with pytest.raises(UnsupportedColumns, match="a column delay_seconds, and needs the option delay_from"):
        writer("value", "destination", "delay_seconds")
    with pytest.raises(UnsupportedColumns, match="column number is int, and must be a timestamp"):
        writer("value", "destination", "delay_seconds", "number", delay_from="number")
    # Spark passes its own options on
    options = {"delay_from": "clicked", "checkpointLocation": "/c", "queryName": "reminders"}
    assert writer("value", "destination", "delay_seconds", "clicked", **options) is not None


def test_a_batch_has_no_options_of_streams() -> None:
    for option in ({"rejects": "/r"}, {"invalid_rows": "fail"}):
        with pytest.raises(InputError, match="can be given to a stream"):
            settings_of({"deliver": "broker", **option}, utcnow())


def test_complete_mode_and_an_older_pyspark(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"use outputMode\('append'\) instead of 'complete'"):
        writer(overwrite=True)
    monkeypatch.setitem(sys.modules, "airflow_delayed.spark.stream", None)
    with pytest.raises(InputError, match=r"a stream needs PySpark 4\.1 or later, and this is .* foreachBatch"):
        writer()


class Stream:
    """Runs batches as Spark does: a writer by batch, copies of it in executors, and another writer for the commit."""

    def __init__(self, folder: Path, **options: object) -> None:
        self.folder = folder
        self.options = {"rejects": folder / "rejects", "manifest": folder / "counts", "destination": "mail", **options}
        self._attempts = 0

    def run(self, batch: int, *partitions: pa.Table, commit: bool = True) -> list[PartitionCommit]:
        columns = partitions[0].column_names
        done = []
        for number, rows in enumerate(partitions):
            self._attempts += 1
            properties = {"sql.streaming.queryId": QUERY, "streaming.sql.batchId": str(batch)}
            context = SimpleNamespace(
                partitionId=lambda number=number: number,
                attemptNumber=lambda: 0,
                taskAttemptId=lambda: self._attempts,
                getLocalProperty=properties.get,
            )
            copy = pickle.loads(pickle.dumps(writer(*columns, **self.options)))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(TaskContext, "get", lambda context=context: context)
                done.append(copy.write(iter(rows.to_batches(max_chunksize=3))))
        if commit:
            writer(*columns, **self.options).commit(done, batch)
        return done

    def counts(self, batch: int) -> dict:
        return json.loads((self.folder / f"counts/{QUERY}/{batch:09}.json").read_text())

    def rejected(self, batch: int) -> list[dict]:
        """The rows of the files that the batch's manifest names; there are no others."""
        folder = self.folder / f"rejects/{QUERY}/{batch:09}"
        if not folder.exists():
            return []
        manifest = json.loads((folder / "manifest.json").read_text())
        assert sorted(path.name for path in folder.iterdir()) == sorted([*manifest["files"], "manifest.json"])
        lines = [line for name in manifest["files"] for line in (folder / name).read_text().splitlines()]
        assert len(lines) == manifest["rows"]
        return sorted(map(json.loads, lines), key=lambda row: str(row.get("value")))


@pytest.fixture
def store(tmp_path: Path, connect) -> Iterator[DelayedStoreHook]:
    """A store in SQLite, which executors know as ``db`` by their environment."""
    fields = json.dumps({"conn_type": "sqlite", "host": str(tmp_path / "store.db")})
    connect("db", conn_type="sqlite", host=str(tmp_path / "store.db"))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("DELAYED_CONN_DB", fields)
        environment.setenv("DELAYED_CONN_BROKER", json.dumps({"conn_type": "rabbitmq", "host": "nowhere.invalid"}))
        with closing(DelayedStoreHook("db", "broker")) as made:
            made.install([])
            yield made


def rows(*values: str | None, due: timedelta = HOUR, **columns: list) -> pa.Table:
    dues = pa.array([utcnow() + due] * len(values), TIME)
    return pa.table({"value": pa.array(values, pa.string()), "due_at": dues, **columns})


def test_a_replay_of_a_batch_sends_the_same_ids(store: DelayedStoreHook, tmp_path: Path) -> None:
    stream = Stream(tmp_path, store="db", until_due="true")
    many = rows(*"abcde")
    stream.run(0, many, commit=False)
    first = {one.message_id for one in store.list()}
    # in other partitions and another order
    stream.run(0, many.slice(3), many.slice(0, 3))
    assert {one.message_id for one in store.list()} == first
    assert len(first) == 5
    summary = stream.counts(0)["summary"]
    assert (summary["rows"], summary["stored"], summary["duplicates"]) == (5, 0, 5)
    # the same rows in another batch are other messages
    stream.run(1, many)
    assert store.count() == 10
    assert stream.counts(1)["summary"]["stored"] == 5


def test_ids_of_the_rows_are_the_same_in_every_batch(store: DelayedStoreHook, tmp_path: Path) -> None:
    stream = Stream(tmp_path, store="db", until_due="true")
    many = rows(*"ab", message_id=["1", "2"])
    for batch in (0, 1):
        stream.run(batch, many)
    assert [one.message_id for one in store.list()] == ["1", "2"]


def test_a_relative_delay_counts_from_a_column(store: DelayedStoreHook, tmp_path: Path) -> None:
    stream = Stream(tmp_path, store="db", until_due="true", delay="PT30M", delay_from="clicked")
    clicked = datetime.fromisoformat("2030-01-31T12:00:00+00:00")
    clicks = pa.table({"value": ["a", "b"], "clicked": pa.array([clicked, None], TIME)})
    for _ in range(2):
        stream.run(0, clicks)
    assert [(one.due_at, one.destination) for one in store.list()] == [(clicked + timedelta(minutes=30), "mail")]
    (rejected,) = stream.rejected(0)
    assert (rejected["value"], rejected["rejected"]["column"]) == ("b", "clicked")
    assert rejected["rejected"]["problem"] == "is null; fill it, for the row's delay counts from it"


def test_each_row_is_judged_by_itself(store: DelayedStoreHook, tmp_path: Path) -> None:
    stream = Stream(tmp_path, store="db", until_due="true", past_due="fail", max_future="P30D", headers='{"key": "s"}')
    ids = {"message_id": ["1", "2", "3"]}
    stream.run(0, rows("a", "b", "c", **ids))
    assert stream.rejected(0) == []
    assert not (tmp_path / "rejects").exists()
    batch = pa.concat_tables(
        [
            # known as it is, known with other content, no body, twice with other content
            rows("a", "other", None, "twice", "twice too", "new", message_id=["1", "2", "4", "5", "5", "6"]).set_column(
                1, "due_at", pa.array([*[store_due(store, "1")] * 6], TIME)
            ),
            rows("too late", due=-2 * HOUR, message_id=["7"]),
            rows("of 1970", due=datetime.fromtimestamp(0).astimezone() - utcnow(), message_id=["8"]),
            rows("next year", due=timedelta(days=366), message_id=["9"]),
        ]
    )
    # in one partition, a few at a time
    for _ in range(2):
        stream.run(1, batch)
        found = {row.get("value"): row["rejected"] for row in stream.rejected(1)}
        assert {value: reason["column"] for value, reason in found.items()} == {
            None: "value",
            "other": "message_id",
            "twice too": "message_id",
            "too late": "due_at",
            "of 1970": "due_at",
            "next year": "due_at",
        }
        assert found["other"]["problem"] == "is known with other content"
        assert "2:00:00" not in found["too late"]["problem"]
        assert "max_future=30 days" in found["next year"]["problem"]
        assert found[None]["place"] == "partition 0, row 3"
        assert {reason["run"] for reason in found.values()} == {f"query {QUERY} batch 1"}
    assert {one.message_id for one in store.list()} == {"1", "2", "3", "5", "6"}
    summary = stream.counts(1)["summary"]
    assert (summary["rows"], summary["rejected"], summary["duplicates"], summary["stored"]) == (9, 6, 3, 0)
    # headers of all rows, which may be secret, stay out
    assert all(not row.get("headers") for row in stream.rejected(1))


def test_of_two_rows_with_one_id_the_one_due_last_replaces_the_other(store: DelayedStoreHook, tmp_path: Path) -> None:
    stream = Stream(tmp_path, store="db", until_due="true", on_conflict="replace")
    both = pa.concat_tables([rows("second", due=2 * HOUR, message_id=["1"]), rows("first", message_id=["1"])])
    stream.run(0, both)
    (found,) = store.list()
    assert found.due_at == max(both["due_at"].to_pylist())
    # in the next batch it is replaced, whatever is due first
    stream.run(1, rows("third", due=HOUR / 2, message_id=["1"]))
    assert store_due(store, "1") < found.due_at
    assert [stream.counts(batch)["summary"]["replaced"] for batch in (0, 1)] == [1, 1]
    assert stream.rejected(0) == []


def store_due(store: DelayedStoreHook, message_id: str) -> datetime:
    (found,) = (one.due_at for one in store.list() if one.message_id == message_id)
    return found


def test_a_replay_without_rejected_rows_leaves_no_file(store: DelayedStoreHook, tmp_path: Path) -> None:
    stream = Stream(tmp_path, store="db", until_due="true")
    stream.run(0, rows("a", None), rows(None), commit=False)
    assert len(list((tmp_path / f"rejects/{QUERY}/000000000").iterdir())) == 2
    stream.run(0, rows("a"), rows("b"))
    assert stream.rejected(0) == []


def test_a_file_of_rejected_rows_that_another_driver_removed(store: DelayedStoreHook, tmp_path: Path) -> None:
    stream = Stream(tmp_path, store="db", until_due="true")
    done = stream.run(0, rows("a", None), commit=False)
    stream.run(0, rows("a", None))
    with pytest.raises(DelayedError, match=r"are gone from .*The batch is not committed"):
        writer(**stream.options).commit(done, 0)
    # those of the other one stay
    assert len(stream.rejected(0)) == 1


def test_without_rejects_a_row_fails_its_task(store: DelayedStoreHook, tmp_path: Path) -> None:
    stream = Stream(tmp_path, store="db", until_due="true", rejects=None, invalid_rows="fail", past_due="skip")
    with pytest.raises(PartitionFailed, match="its row 2, column value: is null"):
        stream.run(0, rows("a", None))
    stream.run(0, rows("a", message_id=["1"]))
    with pytest.raises(PartitionFailed, match="stored already with other content"):
        stream.run(1, rows("b", message_id=["1"]))


class Broker(Transport, DelayedDelivery):
    #: Destinations that the user may not write to.
    denied: frozenset[str] = frozenset()

    def send(self, messages) -> SendReport:
        taken = list(itertools.takewhile(lambda one: one.destination not in self.denied, messages))
        report = super().send(taken)
        if len(taken) == len(messages):
            return report
        failures = [(messages[len(taken)].message_id, "the broker refused it: no write access")]
        raise SendFailed("broker", report, failures, denied=self.denied)

    def install(self, destinations, **options):
        raise NotImplementedError

    verify = install

    def close(self) -> None:
        pass


class Sqs:
    """A client of SQS whose queue ``small`` takes 1,024 bytes, and that has no queue ``nobody``."""

    def __init__(self) -> None:
        self.bodies: list[str] = []

    def get_queue_url(self, **request) -> dict:
        if request["QueueName"] == "nobody":
            raise ClientError({"Error": {"Code": "QueueDoesNotExist"}}, "GetQueueUrl")
        return {"QueueUrl": f"https://sqs.example/1/{request['QueueName']}"}

    def get_queue_attributes(self, **request) -> dict:
        small = request["QueueUrl"].endswith(("small", "small-delay.fifo"))
        wanted = {"FifoQueue": "true", "DelaySeconds": "900", "MessageRetentionPeriod": "1209600"}
        return {"Attributes": {**wanted, "MaximumMessageSize": "1024" if small else "1048576"}}

    def close(self) -> None:
        pass

    def send_message_batch(self, **request) -> dict:
        fault = {"Code": "InvalidParameterValue", "Message": "Message must be shorter", "SenderFault": True}
        failed = [one for one in request["Entries"] if len(one["MessageBody"]) > 1024]
        good = [one for one in request["Entries"] if one not in failed]
        self.bodies += [one["MessageBody"] for one in good]
        names = [{"Id": one["Id"]} for one in good]
        return {"Successful": names, "Failed": [{"Id": one["Id"], **fault} for one in failed]}


def sqs_transport(client: Sqs) -> SqsTransport:
    extra = {"unrestricted_delay": True}
    return SqsTransport("broker", lambda: client, lambda: extra, clock=utcnow, sleep=lambda seconds: None)


def test_a_queue_that_sqs_does_not_have_behind_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Sqs()
    monkeypatch.setattr(connections, "route_of", lambda settings, clock: Route(delivery=sqs_transport(client)))
    stream = Stream(tmp_path, deliver="amqp")
    # a request has ten messages, so that the first is sent before the queue is looked up
    values = [f"{number:02}" for number in range(12)]
    to = ["mail"] * 10 + ["nobody", "mail"]
    stream.run(0, rows(*values, due=timedelta(minutes=5), destination=to))
    assert sorted(client.bodies) == [*values[:10], "11"]
    (rejected,) = stream.rejected(0)
    assert (rejected["value"], rejected["rejected"]["column"]) == ("10", "destination")
    assert "has no destination nobody" in rejected["rejected"]["problem"]


@pytest.mark.parametrize("first", [0, 10])
def test_a_body_that_a_queue_of_sqs_does_not_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    for number, due in enumerate((timedelta(minutes=5), timedelta(days=2))):
        client = Sqs()
        monkeypatch.setattr(
            connections, "route_of", lambda settings, clock, client=client: Route(delivery=sqs_transport(client))
        )
        stream = Stream(tmp_path, deliver="amqp")
        values = [*map(str, range(first)), "x" * 2000, "last"]
        stream.run(number, rows(*values, due=due, destination=["small"] * len(values)))
        assert sorted(client.bodies) == sorted({*values} - {"x" * 2000})
        (rejected,) = stream.rejected(number)
        assert (rejected["value"], rejected["rejected"]["column"]) == ("x" * 2000, "body")


def test_a_destination_that_a_row_names_and_the_user_may_not_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = Broker()
    broker.denied = frozenset({"theirs"})
    monkeypatch.setattr(connections, "route_of", lambda settings, clock: Route(delivery=broker))
    stream = Stream(tmp_path, deliver="amqp")
    stream.run(0, rows(*"abcd", destination=["mail", "theirs", "mail", "theirs"]))
    assert [one.body for one in broker.sent] == [b"a", b"c"]
    assert {row["value"]: row["rejected"]["problem"] for row in stream.rejected(0)} == dict.fromkeys(
        "bd", "the broker refused it: no write access"
    )
    broker.denied = frozenset({"mail"})
    with pytest.raises(PartitionFailed, match="no write access"):
        stream.run(1, rows("a"))


def test_a_destination_that_a_row_names_and_nobody_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker(missing={"nobody"})
    monkeypatch.setattr(connections, "route_of", lambda settings, clock: Route(delivery=broker))
    stream = Stream(tmp_path, deliver="amqp")
    stream.run(0, rows(*"abcde", destination=["mail", "mail", "nobody", "mail", "nobody"]))
    assert [one.body for one in broker.sent] == [b"a", b"b", b"d"]
    assert stream.counts(0)["summary"]["sent"] == 3
    assert [row["value"] for row in stream.rejected(0)] == ["c", "e"]
    # what all rows have in common is no fault of a row
    broker.missing = {"mail"}
    with pytest.raises(PartitionFailed, match="make it"):
        stream.run(1, rows("a"))


def test_the_log_of_a_batch(store: DelayedStoreHook, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    Stream(tmp_path, deliver="db").run(7, rows("a", None, due=-HOUR / 2))
    (line,) = (line for line in caplog.messages if "batch 7" in line)
    assert "batch 7, all confirmed: 0 sent by connection db and 1 stored, of 2 rows" in line
    assert f"1 rejected: see {tmp_path}/rejects; the first of them was due 0:30:0" in line


def test_a_batch_without_partitions_leaves_no_file(tmp_path: Path) -> None:
    writer(rejects=tmp_path / "rejects", manifest=tmp_path / "counts").commit([], 3)
    assert list(tmp_path.iterdir()) == []


def test_what_earlier_tries_of_a_batch_sent_is_counted(store: DelayedStoreHook, tmp_path: Path) -> None:
    stream = Stream(tmp_path, store="db", until_due="true", attempts=tmp_path / "attempts")
    stream.run(0, rows(*"abc"), commit=False)
    stream.run(0, rows(*"abc"), rows("d"))
    counts = stream.counts(0)
    assert (counts["query"], counts["batch"], counts["partitions"]) == (QUERY, 0, 2)
    assert counts["other_attempts"] == {"attempts": 1, "sent": 0, "stored": 3, "exact": False}
    assert list((tmp_path / "attempts").iterdir()) == []


def test_where_spark_does_not_name_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(getLocalProperty=lambda name: None)
    monkeypatch.setattr(TaskContext, "get", lambda: context)
    with pytest.raises(DelayedError, match="does not say which batch"):
        writer().write(iter(()))
