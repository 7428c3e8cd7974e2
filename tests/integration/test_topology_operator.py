"""TopologyInstallOperator on each kind of connection: a plan first, then the parts, then nothing more to do."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest
from airflow.sdk.exceptions import AirflowFailException
from support.rabbitmq import virtual_host
from support.sqs import World

from airflow_delayed.errors import MessagesWaiting, TopologyError
from airflow_delayed.operators.topology import TopologyInstallOperator
from airflow_delayed.sqs.settings import QueueSettings

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
    arguments = {"destinations": [QUEUE], "create_destinations": True, **options}
    return TopologyInstallOperator(task_id="install", conn_id=conn_id, **arguments).execute({})


def test_plan_then_parts_then_nothing_more(conn_id, capsys):
    planned = install(conn_id, dry_run=True)
    assert set(planned) == {"would create"}
    # few lines, however many parts a broker needs
    assert [line for line in capsys.readouterr().out.splitlines() if "would create" in line and QUEUE in line]
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


@pytest.mark.parametrize(
    "options, named",
    [
        ({"topology": "celery"}, "topology"),
        ({"topology": "nservicebus", "routing": "direct"}, "routing, topology"),
        ({"replace": True}, "replace"),
        ({"unroutable_policy": True}, "unroutable_policy"),
        ({"settings": {"retention": 86_400}}, "settings"),
        ({"repair": True}, "repair"),
        ({"uninstall": True, "create_destinations": False}, "uninstall"),
    ],
)
def test_options_of_another_transport_are_refused_before_anything_is_done(connect, tmp_path, options, named):
    conn_id = connect("other", conn_type="sqlite", host=str(tmp_path / "store.db"))
    planned = install(conn_id, dry_run=True)
    with pytest.raises(AirflowFailException, match=f"connection 'other' is of type 'sqlite', which has no {named};"):
        install(conn_id, **options)
    assert install(conn_id, dry_run=True) == planned


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"force": True}, "force is for uninstall=True alone"),
        ({"uninstall": True, "replace": True}, "uninstall=True makes nothing"),
    ],
)
def test_options_that_do_not_go_together(options, problem):
    with pytest.raises(ValueError, match=problem):
        TopologyInstallOperator(task_id="install", conn_id="any", **options)


def test_a_topology_of_its_own_is_installed_and_uninstalled(connect, rabbitmq_url, capsys):
    with virtual_host(rabbitmq_url) as host:
        conn_id = connect("topology", **host.connection)
        options = {"topology": "celery", "routing": "", "unroutable_policy": True}
        planned = install(conn_id, dry_run=True, **options)["would create"]
        assert install(conn_id, **options) == {"created": planned}
        assert host.count("celery_delayed_unroutable") == 0
        host.declare("celery_delayed_0x")
        with host.channel() as channel:
            channel.confirm_delivery()
            channel.basic_publish("", "celery_delayed_27", b"", mandatory=True)
        remove = {"topology": "celery", "uninstall": True, "create_destinations": False}
        with pytest.raises(MessagesWaiting, match="1 in celery_delayed_27"):
            install(conn_id, **remove)
        plan = install(conn_id, dry_run=True, **remove)
        assert plan["blocked"] == 1
        gone = install(conn_id, force=True, **remove)
        assert gone["deleted"] == plan["would delete"]
        assert "queue celery_delayed_27: 1 messages went with it" in capsys.readouterr().out
        left = {found["name"] for found in host.manage("GET", "queues/{vhost}?disable_stats=true")}
        assert left == {QUEUE, "celery_delayed_0x"}


def test_what_differs_is_replaced_when_told(connect, rabbitmq_url):
    with virtual_host(rabbitmq_url) as host:
        conn_id = connect("topology", **host.connection)
        with host.channel() as channel:
            channel.queue_declare("delayed.hex.0000020", durable=True)
        with pytest.raises(
            TopologyError, match=r"queue delayed.hex.0000020 x-queue-type: wanted 'quorum', found 'classic'"
        ):
            install(conn_id)
        assert install(conn_id, replace=True)["deleted"] == 1
        assert set(install(conn_id)) == {"ok"}


def test_a_topology_that_is_unknown_is_no_reason_to_try_again(connect, rabbitmq_url):
    with virtual_host(rabbitmq_url) as host, pytest.raises(AirflowFailException, match="topology 'rabbit' is unknown"):
        install(connect("topology", **host.connection), topology="rabbit")


def test_queues_are_made_as_told_and_repaired_only_when_told(world: World, capsys):
    name = world.destination
    arguments = {"destinations": name, "create_destinations": True}
    settings = {"retention": 86_400, "dead_letter_queue": f"{name}-dead", "max_receive_count": 3}
    install(world.conn_id, **arguments, settings=settings)
    wanted = {"settings": QueueSettings(retention=timedelta(days=2))}
    with pytest.raises(TopologyError, match=r"MessageRetentionPeriod: wanted .*172800.*, found .*86400.* repair=True"):
        install(world.conn_id, **arguments, **wanted)
    assert install(world.conn_id, **arguments, **wanted, repair=True, dry_run=True)["would repair"] == 1
    assert install(world.conn_id, **arguments, **wanted, repair=True)["repaired"] == 1
    assert "repaired" in capsys.readouterr().out
    assert set(install(world.conn_id, **arguments, **wanted)) == {"ok"}


def test_settings_are_checked_when_the_dag_is_parsed():
    with pytest.raises(ValueError, match="settings have no retention_period; known are retention, "):
        TopologyInstallOperator(task_id="install", conn_id="sqs", settings={"retention_period": 60})
