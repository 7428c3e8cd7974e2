"""The path under which a trigger is stored is that of its own class: a triggerer imports that one, and no other."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.triggers.base import BaseTrigger

from airflow_delayed.message import utcnow
from airflow_delayed.triggers.due_time import DueTimeTrigger
from airflow_delayed.triggers.fifo_cycle import FifoCycleTrigger
from airflow_delayed.triggers.store_dispatch import StoreDispatchTrigger

TRIGGERS: dict[type[BaseTrigger], dict[str, Any]] = {
    DueTimeTrigger: {"moment": utcnow()},
    FifoCycleTrigger: {"conn_id": "c", "destinations": ["q"]},
    StoreDispatchTrigger: {"store_conn_id": "c", "deliver_conn_ids": ["d"]},
}


@pytest.mark.parametrize("trigger", TRIGGERS, ids=lambda trigger: trigger.__name__)
def test_a_subclass_is_stored_under_its_own_path(trigger: type[BaseTrigger]) -> None:
    path, arguments = trigger(**TRIGGERS[trigger]).serialize()
    assert path == f"{trigger.__module__}.{trigger.__name__}"
    own = type("Own", (trigger,), {"__module__": "plugins.own"})
    assert own(**TRIGGERS[trigger]).serialize() == ("plugins.own.Own", arguments)
