"""OpenLineage's names of files, tables and queues."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Any

import pytest

from airflow_delayed import lineage
from airflow_delayed.errors import SourceError
from airflow_delayed.lineage import Dataset, Traced


@pytest.mark.parametrize(
    ("url", "namespace", "name"),
    [
        ("/data/day=1", "file", "/data/day=1"),
        ("file:///data/day=1", "file", "/data/day=1"),
        ("s3://bucket/a/b.parquet", "s3://bucket", "a/b.parquet"),
        # Airflow's way to name a connection, which is no part of a name
        ("s3://aws_default@bucket/a/", "s3://bucket", "a"),
        ("s3a://bucket/a", "s3://bucket", "a"),
        ("gcs://bucket/a", "gs://bucket", "a"),
        ("s3://bucket", "s3://bucket", "/"),
        ("hdfs://name:8020/a/b", "hdfs://name:8020", "/a/b"),
        ("abfss://container@account.dfs.core.windows.net/a", "abfss://container@account.dfs.core.windows.net", "a"),
        ("https://user:secret@host/a", "https://host", "a"),
    ],
)
def test_files(url, namespace, name):
    assert lineage.file(url) == Dataset(namespace, name)


def test_a_path_is_told_in_full():
    assert lineage.file("a/b.jsonl") == Dataset("file", os.path.join(os.getcwd(), "a/b.jsonl"))


@pytest.mark.parametrize(
    ("where", "namespace", "name"),
    [
        (("postgresql", "db", 6432, "shop", "public", "t"), "postgres://db:6432", "shop.public.t"),
        (("postgresql", "db", None, "shop", "public", "t"), "postgres://db:5432", "shop.public.t"),
        (("mysql", None, None, "shop", None, "t"), "mysql://localhost:3306", "shop.t"),
        # a schema is a database
        (("mariadb", "db", 3307, "shop", "other", "t"), "mysql://db:3307", "other.t"),
        (("mssql", "db", None, "shop", "dbo", "t"), "mssql://db:1433", "shop.dbo.t"),
        (("sqlite", None, None, "/data/shop.db", "main", "t"), "sqlite:///data/shop.db", "t"),
    ],
)
def test_tables(where, namespace, name):
    assert lineage.table(*where) == Dataset(namespace, name)


def test_queues_of_rabbitmq():
    assert lineage.rabbitmq_queue("rabbit:5672", "/", "orders") == Dataset("amqp://rabbit:5672", "orders")
    assert lineage.rabbitmq_queue("[::1]:5671", "shop", "orders") == Dataset("amqp://[::1]:5671", "shop/orders")


def test_namespace_and_name_of_an_sqs_queue_are_its_arn():
    found = lineage.sqs_queue(
        "aws-cn", "cn-north-1", "https://sqs.cn-north-1.amazonaws.com.cn/123456789012/a-delay.fifo"
    )
    assert ":".join(found) == "arn:aws-cn:sqs:cn-north-1:123456789012:a-delay.fifo"


def test_each_is_named_once_and_no_more_than_a_hundred(monkeypatch):
    monkeypatch.setattr(lineage, "wanted", lambda: True)
    traced = Traced()
    traced._trace(lambda: ([Dataset("n", "a")] * 2, (Dataset("n", str(number)) for number in range(300))))
    assert traced._inputs == [Dataset("n", "a")]
    assert len(traced._outputs) == 100


def test_what_cannot_be_named_fails_no_task_and_shows_no_text_of_others(caplog, monkeypatch):
    monkeypatch.setattr(lineage, "wanted", lambda: True)

    def failing(error: Exception) -> Any:
        raise error

    for error in (SourceError("is not there"), RuntimeError("amqp://user:secret@host")):
        Traced()._trace(partial(failing, error))
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "is not there" in caplog.text
    assert "RuntimeError" in caplog.text
    assert "secret" not in caplog.text
