"""TopologyInstallOperator on each kind of connection: a plan first, then the parts, then nothing more to do."""

from __future__ import annotations

from uuid import uuid4

import pytest
from airflow.sdk.exceptions import AirflowFailException
from support.rabbitmq import virtual_host
from support.sqs import World, world_fixture  # noqa: F401 - a fixture

from airflow_delayed.errors import TopologyError
from airflow_delayed.operators.topology import TopologyInstallOperator

QUEUE = f"mail-{uuid4().hex[:12]}"


@pytest.fixture(params=["aws", "rabbitmq", "sqlite"])
def conn_id(request, connect, tmp_path):
    if request.param == "aws":
        world: World = request.getfixturevalue("world")
        yield world.conn_id
        for url in world.client.list_queues(QueueNamePrefix=QUEUE).get("QueueUrls", ()):
            world.client.delete_queue(QueueUrl=url)
    elif request.param == "sqlite":
        yield connect("topology", conn_type="sqlite", host=str(tmp_path / "store.db"))
    else:
        with virtual_host(request.getfixturevalue("rabbitmq_url")) as host:
            yield connect("topology", **host.connection)


def install(conn_id, **options):
    given = {"destinations": [QUEUE], "create_destinations": True, **options}
    return TopologyInstallOperator(task_id="install", conn_id=conn_id, **given).execute({})


def test_plan_then_parts_then_nothing_more(conn_id, capsys):
    planned = install(conn_id, dry_run=True)
    assert set(planned) == {"would create"}
    assert f"{QUEUE}: would create" in capsys.readouterr().out
    # a plan makes nothing
    assert install(conn_id, dry_run=True) == planned
    assert install(conn_id) == {"created": planned["would create"]}
    assert "created" not in install(conn_id)


def test_missing_destination_is_made_only_when_told(conn_id, capsys):
    assert install(conn_id, create_destinations=False, dry_run=True)["missing"] >= 1
    with pytest.raises(TopologyError, match=f"{QUEUE}: missing"):
        install(conn_id, create_destinations=False)
    install(conn_id)
    assert set(install(conn_id, create_destinations=False)) == {"ok"}


def test_bad_name_is_no_reason_to_try_again(conn_id):
    with pytest.raises((AirflowFailException, TopologyError)):
        install(conn_id, destinations=["x" * 300])
