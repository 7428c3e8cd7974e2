from __future__ import annotations

from datetime import datetime, timedelta
from types import SimpleNamespace

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lengths import length

from airflow_delayed.errors import InvalidMessage
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.intake.arrow import to_batch
from airflow_delayed.intake.columns import RowRules
from airflow_delayed.intake.files import SourceFile
from airflow_delayed.intake.rows import RowReader
from airflow_delayed.message import UTC, microseconds
from airflow_delayed.rabbitmq.topology import DELAYED, NSERVICEBUS

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
YEAR = timedelta(days=365)
FILE = SourceFile(path="rows", format="parquet", partition={}, version=())


def rabbitmq(topology):
    hook = SimpleNamespace(topology=topology)
    return SimpleNamespace(
        check=lambda message: RabbitMQDelayHook.check(hook, message, NOW),
        fits=lambda extremes: RabbitMQDelayHook.fits(hook, extremes, NOW),
    )


def store(deliver_conn_id):
    hook = SimpleNamespace(deliver_conn_id=deliver_conn_id)
    return SimpleNamespace(
        check=lambda message: DelayedStoreHook.check(hook, message, NOW),
        fits=lambda extremes: DelayedStoreHook.fits(hook, extremes, NOW),
    )


TRANSPORTS = [rabbitmq(DELAYED), rabbitmq(NSERVICEBUS), store("rabbit"), store(None)]
ROWS = st.lists(
    st.tuples(
        st.sampled_from(["mail", "mail", "mail", "é" * 90, "x" * 198, "x" * 201, "a..b", "é" * 32]),
        st.sampled_from([-YEAR, YEAR, YEAR, 9 * YEAR]),
        st.dictionaries(
            st.sampled_from(["a", "b", "CC", "Expiration", "content-type", "é" * 128]),
            st.sampled_from(["x", "x", "é" * 120, "é" * 130, "y" * 130_000]),
            max_size=2,
        ),
        st.sampled_from([None, "tag", "é" * 250, "t" * 251, "a\0"]),
    ),
    min_size=1,
    max_size=3,
)


def checked(rows, **rules):
    records = pa.RecordBatch.from_pydict(
        {
            "value": pa.array(["body"] * len(rows)),
            "destination": pa.array([row[0] for row in rows]),
            "due_at": pa.array([microseconds(NOW + row[1]) for row in rows]).cast(pa.timestamp("us", tz="UTC")),
            "headers": pa.array([list(row[2].items()) for row in rows], pa.map_(pa.string(), pa.string())),
            "tag": pa.array([row[3] for row in rows], pa.string()),
        }
    )
    return RowReader(RowRules(anchor=NOW, **rules)).check(to_batch(records, FILE, 1))


def passes(transport, message):
    try:
        transport.check(message)
    except InvalidMessage:
        return False
    return True


@settings(max_examples=length("examples of extremes", 20, 200))
@given(ROWS, st.sampled_from([{}, {"CC": "x"}, {"given": "é" * 130}]))
def test_what_fits_by_its_extremes_passes_one_by_one(rows, headers):
    found = checked(rows, headers=headers)
    for transport in TRANSPORTS:
        if transport.fits(found.bounds()):
            assert all(passes(transport, message) for message in found.messages())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_usual_messages_fit(transport):
    assert transport.fits(checked([("mail", YEAR, {"a": "1", "b": "2"}, "tag"), ("sms", -YEAR, {}, None)]).bounds())


@pytest.mark.parametrize(
    ("row", "unfit"),
    [
        (("x" * 242, YEAR, {}, None), [0, 1, 2, 3]),
        (("x" * 64, YEAR, {}, None), [3]),
        (("mail", 9 * YEAR, {}, None), [0, 1]),
        (("mail", YEAR, {"CC": "x"}, None), [0, 1]),
        (("mail", YEAR, {"a": "y" * 130_000}, None), [0, 1]),
        (("mail", YEAR, {}, "t" * 251), [2, 3]),
        (("mail", YEAR, {}, "a\0"), [2, 3]),
    ],
)
def test_one_message_beyond_a_limit_is_enough(row, unfit):
    found = checked([("mail", YEAR, {}, None), row]).bounds()
    assert [place for place, transport in enumerate(TRANSPORTS) if not transport.fits(found)] == unfit
