"""Whether many messages fit into the store's columns, told from what bounds them."""

from __future__ import annotations

from airflow_delayed.extremes import Extremes
from airflow_delayed.store.schema import MAX_DESTINATION, MAX_QUEUE_NAME, MAX_TAG


def within_bounds(extremes: Extremes, *, queue_tables: bool) -> bool:
    """Return whether all messages within these bounds can be stored; False where that is not sure.

    :param queue_tables: destinations are tables in the same database.
    """
    if extremes.longest_tag > MAX_TAG or extremes.null_in_tag:
        return False
    return all(
        len(name) <= MAX_DESTINATION and "\0" not in name and (not queue_tables or len(name.encode()) <= MAX_QUEUE_NAME)
        for name in extremes.destinations
    )
