"""What the page is told of a message, and where it stands in Airflow's UI. No database here."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.provider_info import get_provider_info
from airflow_delayed.ui.models import text_of
from airflow_delayed.ui.plugin import DelayedPlugin, views


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=50), st.integers(0, 200))
def test_the_beginning_of_a_text_is_text(text: str, limit: int):
    data = text.encode()
    found = text_of(data[:limit], whole=limit >= len(data))
    assert found is not None
    assert text.startswith(found)
    # no more than one character is missing
    assert len(data[:limit]) - len(found.encode()) < 4


@given(st.binary(max_size=20))
def test_bytes_are_text_or_not(data: bytes):
    found = text_of(data, whole=True)
    assert found is None or (found.encode() == data and not any(ord(one) < 32 and one not in "\t\r\n" for one in found))


def test_what_is_no_text():
    assert text_of(b"\xff", whole=True) is None
    assert text_of(b"a\0", whole=True) is None
    assert text_of("é".encode()[:1], whole=True) is None
    assert text_of(b"ab\xc3\x28cd", whole=False) is None


def test_the_page_is_in_airflows_navigation(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "https://example.com/team/airflow/")
    [place] = views()
    assert (place["destination"], place["href"]) == ("nav", "/team/airflow/delayed-deliveries/")
    assert place["icon"] == "/team/airflow/delayed-deliveries/static/icon.svg"


def test_airflow_loads_one_plugin_however_it_is_found():
    (listed,) = get_provider_info()["plugins"]
    assert listed == {"name": DelayedPlugin.name, "plugin-class": "airflow_delayed.ui.plugin.DelayedPlugin"}


def test_the_plugin_is_light_for_all_who_load_it(fresh):
    loaded = fresh["imported by the plugin"]
    assert all(name.partition(".")[0] in ("airflow_delayed", "airflow") for name in loaded), loaded
    # of the core only what reads the configuration, and of the rooms nothing else
    assert {name for name in loaded if name.count(".") > 1 and name.startswith("airflow_delayed.")} == {
        "airflow_delayed.ui.plugin"
    }
