"""A filter from the keywords of a method, and as the key of a cache of statements."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select

from airflow_delayed.errors import NaiveTime, NullCriterion
from airflow_delayed.identity import SentBy
from airflow_delayed.store.filters import OWN, MessageFilter, MessageState, filter_of, moments
from airflow_delayed.store.schema import store_tables

TABLES = store_tables()
NOW = datetime(2030, 1, 1, tzinfo=timezone.utc)
TEXTS = st.none() | st.text(max_size=3)
TIMES = st.datetimes(timezones=st.just(timezone.utc))
SENDERS = st.fixed_dictionaries(
    {"dag_id": st.text()},
    optional={"run_id": st.text(max_size=3), "task_id": st.text(max_size=3), "map_index": st.integers(-1, 3)},
)
FILTERS = st.builds(
    MessageFilter,
    destination=TEXTS,
    deliver_conn_id=TEXTS | st.just(OWN),
    tag=TEXTS,
    due_from=st.none() | TIMES,
    due_until=st.none() | TIMES,
    states=st.none() | st.lists(st.sampled_from(MessageState), max_size=3),
    sent_by=st.none() | SENDERS.map(lambda names: SentBy(**names)),
)


@given(FILTERS)
def test_a_statement_lacks_nothing_but_the_moment(wanted: MessageFilter):
    """So the next page, of the same filter, is read by the same statement."""
    assert hash(wanted) is not None
    for where in ("messages", "failed"):
        conditions = wanted.conditions(TABLES, where)
        if conditions is not None:
            made = select(TABLES.messages.c.Id).where(*conditions).compile()
            missing = {name for name, value in made.params.items() if value is None}
            assert missing <= moments(NOW).keys()
            assert not missing or (where == "messages" and wanted.states)


def test_equal_filters_are_one_key():
    def made(tag: str) -> MessageFilter:
        return MessageFilter(tag=tag, due_from=NOW, states=[MessageState.DUE], sent_by=SentBy(dag_id="d"))

    assert len({made("a"), made("a"), made("b")}) == 2
    assert MessageFilter(deliver_conn_id=OWN) != MessageFilter(deliver_conn_id="own")


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
