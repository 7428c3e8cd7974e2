"""What a send says in the asset events of its task's outlets. Never a body or a header's value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk import Asset
from airflow.sdk.definitions.asset import AssetRef

from airflow_delayed.sending import Sending

if TYPE_CHECKING:
    from airflow.sdk import Context

#: How many destinations an event names, those with the most messages; the others are counted.
NAMED = 100


def describe(context: Context, outlets: Iterable[object], sending: Sending, summary: Mapping[str, Any]) -> None:
    """Put what was sent into the extra of each outlet's event: the summary, and ``destinations`` with their counts.

    With more than 100 destinations, ``other_destinations`` says how many are not named. An alias has no event of its
    own. Of earlier tries all is counted that they had confirmed, also what the store had before them.
    """
    counts: dict[str, int] = {}
    for report in (sending.earlier, sending.sent, sending.held):
        for name, count in report.by_destination.items():
            counts[name] = counts.get(name, 0) + count
    most = sorted(counts, key=lambda name: (-counts[name], name))[:NAMED]
    extra = {**summary, "destinations": {name: counts[name] for name in most}}
    if len(counts) > NAMED:
        extra["other_destinations"] = len(counts) - NAMED
    add_to_events(context, outlets, extra)


def add_to_events(context: Context, outlets: Iterable[object], extra: Mapping[str, Any]) -> None:
    """Put something into the extra of each outlet's event."""
    for outlet in outlets:
        if isinstance(outlet, Asset | AssetRef):
            context["outlet_events"][outlet].extra.update(extra)
