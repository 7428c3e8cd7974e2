"""Beside apache-airflow-provider-rabbitmq, which has a connection type ``rabbitmq`` too, whichever comes first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.fresh import NEIGHBOUR

from airflow_delayed.provider_info import get_provider_info


@pytest.mark.parametrize("place", ["first", "last"])
def test_the_type_is_ours_whichever_was_installed_first(fresh: dict[str, Any], place: str) -> None:
    assert Path(NEIGHBOUR).is_dir(), "run `make setup`, which installs it there"
    (kind,) = get_provider_info()["connection-types"]
    # Airflow looks at providers by their names, so the order in which they were installed is all the same
    assert fresh[f"beside a neighbour that comes {place}"] == {
        "providers": ["airflow-provider-delayed", "apache-airflow-provider-rabbitmq"],
        "hook": kind["hook-class-name"],
        "fields": sorted(kind["conn-fields"]),
        "label": "Virtual host",
        "transports": ["RabbitMQDelayHook", "RabbitMQDelayHook"],
    }


def test_no_other_form_changes(fresh: dict[str, Any]) -> None:
    with_us, without = fresh["forms with us"], fresh["forms without us"]
    # the neighbour's type is ours too, see above
    assert without.pop("rabbitmq") != with_us.pop("rabbitmq")
    assert with_us == without
    assert {"aws", "postgres", "sqlite"} <= with_us.keys()
