"""The addresses of the page of delayed deliveries."""

from __future__ import annotations

from importlib import import_module
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.links import base_path, page_link
from airflow_delayed.operators.custom_dispatch import CustomStoreDispatchOperator
from airflow_delayed.provider_info import get_provider_info


@pytest.mark.parametrize(
    ("base_url", "path"),
    [
        ("http://localhost:8080", ""),
        ("http://localhost:8080/", ""),
        ("https://air.example/airflow", "/airflow"),
        ("https://air.example/a/b/", "/a/b"),
        # what Airflow takes for its default
        ("/", ""),
        ("", ""),
    ],
)
def test_the_path_of_the_base_url_is_kept_and_its_host_is_not(base_url, path):
    assert base_path(base_url) == path
    assert page_link(base_url) == f"{path}/plugin/delayed-deliveries"


def test_a_part_of_the_page():
    run_id = "scheduled__2026-01-01T00:00:00+00:00"
    link = page_link("/", store="db", dag_id="d", run_id=run_id, task_id="t", map_index=3)
    assert link == (
        "/plugin/delayed-deliveries/delayed-deliveries/?store=db&dag_id=d"
        "&run_id=scheduled__2026-01-01T00%3A00%3A00%2B00%3A00&task_id=t&map_index=3"
    )
    assert "map_index" not in page_link("/", task_id="t", map_index=-1)
    assert "map_index" not in page_link("/", task_id="t", map_index=None)


@given(st.dictionaries(st.sampled_from(["store", "dag_id", "run_id", "task_id"]), st.text(min_size=1)))
def test_whatever_a_name_holds_comes_out_again(names):
    parts = urlsplit(page_link("https://air.example/airflow", **names))
    assert (parts.scheme, parts.netloc, parts.fragment) == ("", "", "")
    page = "/airflow/plugin/delayed-deliveries"
    assert parts.path == (f"{page}/airflow/delayed-deliveries/" if names else page)
    assert parse_qs(parts.query, strict_parsing=bool(names)) == {name: [value] for name, value in names.items()}


def test_the_metadata_names_each_link():
    found = get_provider_info()["extra-links"]
    links = {vars(import_module(path.rpartition(".")[0]))[path.rpartition(".")[2]]().name for path in found}
    assert links == {"Messages in the store", "Delayed deliveries"}


def test_a_dispatcher_of_a_store_of_ones_own_leads_to_the_page():
    task = CustomStoreDispatchOperator(task_id="t", store="a:b", name="n", conn_id="c")
    (link,) = task.operator_extra_links
    # which of the page's stores that would be is not known
    assert link.get_link(task, ti_key=None) == page_link("/")
