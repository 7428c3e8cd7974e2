from __future__ import annotations

from types import SimpleNamespace

from airflow.sdk import Asset
from airflow.sdk.execution_time.context import OutletEventAccessors

from airflow_delayed.delivery import SendReport
from airflow_delayed.operators.reporting import NAMED, describe_events


def test_an_event_names_the_destinations_with_the_most_messages_and_counts_the_others():
    direct = {f"q{number:03}": number for number in range(NAMED + 20)}
    sending = SimpleNamespace(
        earlier=SendReport(by_destination={"store": 200}),
        sent=SendReport(by_destination=direct),
        held=SendReport(by_destination={"q000": 1000, "store": 300}),
    )
    asset = Asset("reminders")
    events = OutletEventAccessors()
    describe_events({"outlet_events": events}, [asset], sending, {"sent": 1})
    extra = events[asset].extra
    named = extra["destinations"]
    assert list(named)[:3] == ["q000", "store", f"q{NAMED + 19}"]
    assert (named["q000"], len(named), extra["other_destinations"], extra["sent"]) == (1000, NAMED, 21, 1)
