"""A filter from the keywords of a method."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from airflow_delayed.errors import NaiveTime, NullCriterion
from airflow_delayed.store.filters import OWN, MessageFilter, MessageState, filter_of

NOW = datetime(2030, 1, 1, tzinfo=timezone.utc)


def test_the_keywords_of_a_filter():
    berlin = timezone(timedelta(hours=1))
    made = filter_of(
        {"tag": "t", "deliver_conn_id": "store", "due_from": NOW.astimezone(berlin), "state": "due"},
        own_conn_id="store",
    )
    assert made == MessageFilter(tag="t", deliver_conn_id=OWN, due_from=NOW, states=[MessageState.DUE])
    assert made.criteria == {
        "deliver_conn_id": "its own queue tables",
        "tag": "t",
        "due_from": "2030-01-01T00:00:00+00:00",
        "states": ["due"],
    }
    assert filter_of({"deliver_conn_id": "other"}, own_conn_id="store").criteria == {"deliver_conn_id": "other"}


@pytest.mark.parametrize(
    "keywords, error, text",
    [
        ({"tags": "t"}, TypeError, "unexpected keyword argument 'tags'; those of a filter are destination, deliver_"),
        ({"states": ["due"]}, TypeError, "'states'"),
        ({"state": ["due", "gone"]}, ValueError, "state='gone' is none of waiting, due, in flight, retrying, failed"),
        ({"due_until": datetime(2030, 1, 1)}, NaiveTime, "due_until"),
        ({"tag": "t", "destination": None}, NullCriterion, "destination= is None, which would select more messages"),
    ],
)
def test_keywords_that_are_wrong(keywords, error, text):
    with pytest.raises(error, match=text):
        filter_of(keywords, own_conn_id="store")
