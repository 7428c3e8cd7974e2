"""The section [delayed] of Airflow's configuration."""

from __future__ import annotations

import re
from configparser import ConfigParser
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import pages

from airflow_delayed import config
from airflow_delayed.errors import InvalidOption
from airflow_delayed.message import utcnow
from airflow_delayed.operators.custom_dispatch import CustomStoreDispatchOperator
from airflow_delayed.operators.dispatch import StoreDispatchOperator
from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.operators.spark import DelayedSparkSendOperator
from airflow_delayed.provider_info import get_provider_info
from airflow_delayed.spark.options import settings_of
from airflow_delayed.store.policy import DispatchPolicy

OPTIONS = get_provider_info()["config"]["delayed"]["options"]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "airflow" / "configuration.md"


def setting(monkeypatch, **options: str) -> None:
    for name, text in options.items():
        monkeypatch.setenv(f"AIRFLOW__DELAYED__{name.upper()}", text)


def send(**arguments: Any) -> DelayedSendOperator:
    return DelayedSendOperator(task_id="t", conn_id="c", value="v", destination="q", delay=1, **arguments)


def test_defaults_are_those_of_the_core():
    policy, executors = DispatchPolicy(), settings_of({"deliver": "b"}, utcnow())
    assert (config.lookahead(), config.remember()) == (policy.farthest, policy.remember)
    assert (config.hold_over(), config.max_past()) == (executors.hold_over, executors.max_past)
    assert (policy.farthest, policy.remember, executors.max_past) == (
        timedelta(minutes=15),
        timedelta(days=14),
        timedelta(hours=1),
    )
    dispatch = StoreDispatchOperator(task_id="t", store_conn_id="db", deliver_conn_ids=["b"])
    for each in (dispatch, CustomStoreDispatchOperator(task_id="t", store="a:b", name="n", conn_id="c")):
        for name in vars(each).keys() & {field.name for field in fields(policy)} - {"allowed_destinations"}:
            assert getattr(each, name) == getattr(policy, name), name
    assert (config.deliver_conn_ids(), config.page_stores(), config.page_rabbitmq(), config.page_sqs()) == ((),) * 4
    assert config.page_body_limit() == 16384


def test_every_option_has_its_reader_and_no_other_is_read():
    readers = {name for name, found in vars(config).items() if callable(found) and found.__module__ == config.__name__}
    assert {name for name in readers if not name.startswith("_")} == set(OPTIONS)
    for name in OPTIONS:
        getattr(config, name)()


def test_a_task_takes_what_it_is_not_told(monkeypatch):
    setting(monkeypatch, hold_over="420", lookahead="300.5", remember="60", max_past="5", deliver_conn_ids=" a, b,a,")
    task = send()
    assert (task.hold_over, task.max_past) == (timedelta(minutes=7), timedelta(seconds=5))
    spark = DelayedSparkSendOperator(task_id="t", conn_id="c", source="rows")
    assert (spark.hold_over, spark.max_past) == (timedelta(minutes=7), timedelta(seconds=5))
    dispatch = StoreDispatchOperator(task_id="t", store_conn_id="db")
    policy = DispatchPolicy.of(vars(dispatch))
    assert (policy.lookahead, policy.farthest, policy.remember) == (
        "auto",
        timedelta(seconds=300.5),
        timedelta(minutes=1),
    )
    assert dispatch.deliver_conn_ids == ["a", "b"]
    custom = CustomStoreDispatchOperator(task_id="t", store="a:b", name="n", conn_id="c")
    assert DispatchPolicy.of(vars(custom)).farthest == timedelta(seconds=300.5)


def test_what_a_task_says_wins(monkeypatch):
    # nothing of this could be read
    setting(monkeypatch, **dict.fromkeys(("hold_over", "lookahead", "remember", "max_past"), "soon"))
    setting(monkeypatch, deliver_conn_ids="a")
    task = send(hold_over=timedelta(0), max_past=timedelta(0))
    assert (task.hold_over, task.max_past) == (timedelta(0), timedelta(0))
    own: dict[str, Any] = {"hold_over": timedelta(0), "max_past": timedelta(0)}
    spark = DelayedSparkSendOperator(task_id="t", conn_id="c", source="rows", **own)
    assert (spark.hold_over, spark.max_past) == (timedelta(0), timedelta(0))
    zero: dict[str, Any] = {"lookahead": timedelta(0), "remember": timedelta(0)}
    dispatch = StoreDispatchOperator(task_id="t", store_conn_id="db", deliver_conn_ids="db", **zero)
    assert (dispatch.lookahead, dispatch.remember, dispatch.deliver_conn_ids) == (*zero.values(), "db")


def test_a_dispatcher_of_no_connection_is_an_error():
    with pytest.raises(ValueError, match=r"deliver_conn_ids in section \[delayed\].* is empty"):
        StoreDispatchOperator(task_id="t", store_conn_id="db")


@pytest.mark.parametrize(
    ("option", "text", "advice"),
    [
        ("hold_over", "15 minutes", "give a number of seconds, 0 or more, or an ISO 8601 duration such as PT10M"),
        ("lookahead", "-1", "give a number of seconds, 0 or more"),
        ("remember", "nan", "give a number of seconds, 0 or more"),
        ("max_past", "1e99", "give a number of seconds, 0 or more"),
        ("max_past", "", "give a number of seconds, 0 or more"),
        ("page_sqs", "reminders", "write each as conn_id:queue"),
        ("page_sqs", "a:q,:q", "write each as conn_id:queue"),
        ("page_body_limit", "64 kB", "give a whole number of bytes"),
        ("page_body_limit", "-1", "give a whole number of bytes"),
        ("max_messages_per_run", "10e6", "give a whole number of messages"),
        ("sqlite_on_shared_disk", "perhaps", "write True or False"),
    ],
)
def test_what_a_value_cannot_mean_is_an_error_that_names_the_option(monkeypatch, option, text, advice):
    setting(monkeypatch, **{option: text})
    with pytest.raises(InvalidOption, match=re.escape(advice)) as caught:
        getattr(config, option)()
    assert f"option {option} in section [delayed]" in str(caught.value)
    assert f"AIRFLOW__DELAYED__{option.upper()}" in str(caught.value)


def test_the_page_of_operations(monkeypatch):
    # a connection's name may have colons
    setting(monkeypatch, page_stores="a,b", page_rabbitmq="r", page_sqs="aws : one, a:b:two.fifo", page_body_limit="0")
    assert (config.page_stores(), config.page_rabbitmq()) == (("a", "b"), ("r",))
    assert config.page_sqs() == (("aws", "one"), ("a:b", "two.fifo"))
    assert config.page_body_limit() == 0


@given(st.decimals(0, 10**9, allow_nan=False, places=6))
def test_seconds_are_read_exactly(seconds):
    with pytest.MonkeyPatch.context() as patch:
        setting(patch, lookahead=str(seconds))
        read = config.lookahead()
    assert abs(read - timedelta(seconds=int(seconds), microseconds=int(seconds % 1 * 10**6))) <= timedelta(
        microseconds=1
    )


def test_the_docs_say_what_the_metadata_says():
    rows = re.findall(r"^\| `(\w+)` \| (?:`([^`]*)`)? ?\|", PAGE.read_text(), re.MULTILINE)
    assert dict(rows) == {name: option["default"] for name, option in OPTIONS.items()}


def test_the_docs_example_can_be_read(monkeypatch):
    ((language, text),) = pages.blocks(PAGE)
    assert language == "ini"
    parser = ConfigParser()
    parser.read_string(text)
    assert parser.sections() == ["delayed"]
    setting(monkeypatch, **parser["delayed"])
    assert set(parser["delayed"]) <= set(OPTIONS)
    assert config.lookahead() == timedelta(minutes=7)
    assert config.page_sqs() == (("aws_default", "reminders"),)
    for name in OPTIONS:
        getattr(config, name)()


def test_every_option_is_described():
    for name, option in OPTIONS.items():
        assert option["description"].endswith("."), name
        assert isinstance(option["default"], str), name
        assert option["example"] != option["default"], name
