"""Asset URIs of queues, as Airflow reads them."""

from __future__ import annotations

import pytest
from airflow.sdk import Asset
from airflow.sdk.providers_manager_runtime import ProvidersManagerTaskRuntime
from support import pages

from airflow_delayed.assets import create_asset


@pytest.mark.parametrize(
    "uri, normal",
    [
        ("delayed://rabbitmq_default/orders", "delayed://rabbitmq_default/orders"),
        ("DELAYED://Conn/Orders/", "delayed://Conn/Orders"),
        ("delayed://conn/%6frders", "delayed://conn/orders"),
        ("delayed://conn/a b", "delayed://conn/a%20b"),
        ("delayed://conn/caf\u00e9", "delayed://conn/caf%C3%A9"),
        ("delayed://conn/a%2Fb%3Fc%23d%25e", "delayed://conn/a%2Fb%3Fc%23d%25e"),
        ("delayed://a:b/q", "delayed://a%3Ab/q"),
    ],
)
def test_a_queue_is_one_asset_however_its_name_is_encoded(uri, normal):
    assert Asset(uri).uri == normal
    assert Asset(normal).uri == normal


@pytest.mark.parametrize(
    "uri, why",
    [
        ("delayed:///orders", "'' is no name of a connection"),
        ("delayed://user@conn/orders", "'user@conn' is no name of a connection"),
        ("delayed://conn", "it names no queue"),
        ("delayed://conn/", "it names no queue"),
        ("delayed://conn/a/b", "a slash in the name of a queue is written as %2F"),
        ("delayed://conn//a", "a slash in the name of a queue is written as %2F"),
        ("delayed://conn/a%zz", "the name of the queue is not percent-encoded UTF-8; a % is written as %25"),
        ("delayed://conn/a%FF", "the name of the queue is not percent-encoded UTF-8"),
        ("delayed://c%onn/a", "the name of the connection is not percent-encoded UTF-8"),
        ("delayed://conn/a%0Ab", "the name of the queue has unprintable characters"),
        ("delayed://conn/a?b=c", "it has a query; a question mark in a name is written as %3F"),
    ],
)
def test_what_names_no_queue_is_refused(uri, why):
    with pytest.raises(ValueError, match="write it as delayed://conn_id/queue") as caught:
        Asset(uri)
    assert why in str(caught.value)


@pytest.mark.parametrize("conn_id", ["conn", "a/b#c"])
@pytest.mark.parametrize("queue", ["orders", "a/b", "a b?c#d%e", "caf\u00e9"])
def test_an_asset_of_names(conn_id, queue):
    factory = ProvidersManagerTaskRuntime().asset_factories["delayed"]
    made = factory(conn_id=conn_id, queue=queue, extra={"a": 1})
    assert made == create_asset(conn_id=conn_id, queue=queue, extra={"a": 1})
    assert made.uri.isascii()
    assert Asset(made.uri).uri == made.uri
    assert made.extra == {"a": 1}


@pytest.mark.parametrize("conn_id, queue", [("", "q"), ("conn", ""), ("no name", "q")])
def test_a_name_that_is_none_is_refused(conn_id, queue):
    with pytest.raises(ValueError, match="asset URI "):
        create_asset(conn_id=conn_id, queue=queue)


def test_the_page_about_lineage_and_assets(here):
    assert list(pages.run(here / "docs/airflow/lineage.md")) == [None]
