"""How a client repeats requests, by whatever it is made."""

from __future__ import annotations

import json
from typing import Any

import pytest

from airflow_delayed.delivery import Connection
from airflow_delayed.hooks.sqs import SqsDelayHook
from airflow_delayed.message import utcnow
from airflow_delayed.sqs.transport import SqsTransport

OURS = {"mode": "standard", "total_max_attempts": 5}


def retries(transport: SqsTransport) -> dict[str, Any]:
    return dict(transport._client.meta.config.retries)


@pytest.fixture(params=["hook", "plain connection"], name="made")
def made_fixture(request, monkeypatch: pytest.MonkeyPatch):
    """Return a function that makes a transport with this in its connection's extra."""
    monkeypatch.delenv("AWS_RETRY_MODE", raising=False)
    monkeypatch.delenv("AWS_MAX_ATTEMPTS", raising=False)

    def make(**extra: Any) -> SqsTransport:
        extra = {"region_name": "us-east-1", **extra}
        if request.param == "hook":
            fields = {"conn_type": "aws", "login": "x", "password": "x", "extra": extra}
            monkeypatch.setenv("AIRFLOW_CONN_SQS_RETRIES", json.dumps(fields))
            return SqsDelayHook("sqs_retries")
        connection = Connection(conn_id="c", conn_type="aws", login="x", password="x", extra=extra)
        return SqsTransport.of(connection, clock=utcnow)

    return make


def test_botocore_repeats_requests_in_its_standard_mode(made):
    assert retries(made()) == OURS


def test_what_the_connection_says_counts(made):
    assert retries(made(config_kwargs={"retries": {"mode": "adaptive", "total_max_attempts": 2}})) == {
        "mode": "adaptive",
        "total_max_attempts": 2,
    }
    assert retries(made(config_kwargs={"connect_timeout": 1})) == OURS


def test_what_the_environment_says_counts(made, monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "7")
    assert retries(made()) == {"mode": "standard", "total_max_attempts": 7}
    monkeypatch.setenv("AWS_RETRY_MODE", "legacy")
    assert retries(made()) == {"mode": "legacy", "total_max_attempts": 7}
