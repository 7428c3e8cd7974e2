"""One statement serves all filters that differ in values only."""

from __future__ import annotations

from datetime import timezone

from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select

from airflow_delayed.origin import SentBy
from airflow_delayed.store.criteria import OWN, Criteria
from airflow_delayed.store.schema import store_tables
from airflow_delayed.store.states import EXAMPLE, MessageState, moments

TABLES = store_tables()
TEXTS = st.none() | st.text(max_size=3)
TIMES = st.datetimes(timezones=st.just(timezone.utc))
CRITERIA = st.builds(
    Criteria,
    destination=TEXTS,
    deliver_conn_id=TEXTS | st.just(OWN),
    tag=TEXTS,
    due_from=st.none() | TIMES,
    due_until=st.none() | TIMES,
    states=st.none() | st.lists(st.sampled_from(MessageState), max_size=3),
    sent_by=st.none()
    | st.builds(SentBy, dag_id=st.text(), run_id=TEXTS, task_id=TEXTS, map_index=st.none() | st.integers(-1, 3)),
)


@given(CRITERIA, st.datetimes(min_value=EXAMPLE.replace(tzinfo=None), timezones=st.just(timezone.utc)))
def test_a_statement_for_the_shape_asks_the_same_with_the_values(criteria: Criteria, now):
    for own, shared in (
        (criteria.of_messages(TABLES, now), criteria.shape.of_messages(TABLES, EXAMPLE)),
        (criteria.of_failed(TABLES), criteria.shape.of_failed(TABLES)),
    ):
        assert (own is None) == (shared is None)
        if own is not None and shared is not None:
            wanted = select(TABLES.messages.c.Id).where(*own).compile()
            made = select(TABLES.messages.c.Id).where(*shared).compile()
            assert str(made) == str(wanted)
            assert made.construct_params({**criteria.values, **moments(now)}) == wanted.params


def test_filters_that_differ_in_values_have_one_shape():
    def shape(tag: str, day: int, run: int) -> Criteria:
        due = EXAMPLE.replace(day=day)
        return Criteria(
            tag=tag, due_from=due, states=[MessageState.DUE], sent_by=SentBy(dag_id=tag, map_index=run)
        ).shape

    # by which the statement is found again
    assert {shape("a", 1, 1), shape("b", 2, 2)} == {shape("c", 3, 3)}
    assert Criteria(tag="a").shape != Criteria(destination="a").shape
    assert Criteria(deliver_conn_id=OWN).shape != Criteria(deliver_conn_id="own").shape
