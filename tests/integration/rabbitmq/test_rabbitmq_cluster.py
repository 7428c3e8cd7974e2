"""Nodes of a cluster that are killed, frozen or cut off: what was confirmed arrives, never early.

At the end of a run stands a table of these tests: what was confirmed, arrived, came twice, was lost or early, how late
it came, the longest time without a confirm, the time from the fault to the first text that names its cause, and what
the log and verify() say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone

import pytest
from support.chaos import Chaos, Outcome, messages_due, table
from support.lengths import TABLES
from support.rabbitmq import VirtualHost, eventually, messages, virtual_host

from airflow_delayed.delivery import TopologyReport
from airflow_delayed.errors import SendFailed, TransportUnavailable
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.message import DelayedMessage
from services import rabbitmq_cluster
from services.rabbitmq_cluster import Cluster, Node

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]
TITLE = "RabbitMQ clusters of three nodes under faults, in seconds"
#: Messages per second, and seconds of sending.
RATE, SECONDS = 100, 40
#: Seconds that a fault lasts which passes only when it is ended.
LASTS = 40
#: Seconds from a fault to the first text that names its cause, in the log or of verify(), at most.
NAMED = 15
#: Longer than Erlang's nodes take to give each other up (net_ticktime, 60 s, and up to a quarter more).
GIVEN_UP = 90
OUTCOMES: list[Outcome] = []
#: Texts that name a cause.
DOWN = r"nodes? \S+@.*: does not run"
NO_QUORUM = r"no quorum|lost their quorum|without a leader\?"


#: Makes a hook to the cluster, with other fields of the connection.
Hook = Callable[..., RabbitMQDelayHook]


class Run:
    """A virtual host of a cluster whose queues are led by one node, and a client that begins with one of the nodes."""

    def __init__(self, cluster: Cluster, vhost: VirtualHost, chaos: Chaos, hook: Hook) -> None:
        self.cluster, self.vhost, self.hook = cluster, vhost, hook
        self.leader, self.other, self.third = cluster.nodes
        self._chaos = chaos
        self.verify = chaos.verify
        self.fault_begins = chaos.fault_begins

    def play(
        self,
        name: str,
        faults: Callable[[], None],
        batch: list[DelayedMessage] | None = None,
        *,
        cause: str,
        before: float = 5,
    ) -> Outcome:
        """Play faults while messages are sent; all have to be confirmed in the end, and to arrive.

        :param cause: a regular expression of texts that name the cause, of which one has to come in time.
        """
        batch = batch or messages_due(RATE * SECONDS, rate=RATE, after=(5, 40))
        outcome = self._chaos.play(
            name, faults, batch, rate=RATE, cause=cause, free_stuck=self._free_stuck, before=before
        )
        OUTCOMES.append(outcome)
        TABLES[TITLE] = table(OUTCOMES)
        assert (outcome.confirmed, outcome.arrived, outcome.lost) == (len(batch), len(batch), 0), outcome
        assert outcome.named is not None, outcome
        assert outcome.named <= NAMED, outcome
        return outcome

    def _free_stuck(self) -> None:
        """Move all leaders, as `rabbitmq-queues rebalance quorum` does.

        RabbitMQ 3.10.8 may keep messages for ever that a killed leader was dead-lettering, until the next one leads.
        """
        self.cluster.restore()
        for node in self.cluster.nodes:
            self.cluster.lead(node, self.vhost.name)

    def last(self, seconds: float = LASTS) -> list[TopologyReport]:
        """Let a fault last, and return what verify() reports at its beginning and near its end, each time in time."""
        ends = time.monotonic() + seconds
        time.sleep(2)
        reports = [self._verify_in_time()]
        time.sleep(max(0, ends - NAMED - time.monotonic()))
        reports.append(self._verify_in_time())
        time.sleep(max(0, ends - time.monotonic()))
        return reports

    def _verify_in_time(self) -> TopologyReport:
        began = time.monotonic()
        report = self.verify()
        assert time.monotonic() - began < NAMED
        return report


def require(report: TopologyReport, severity: str, *codes: str) -> None:
    """Check that a report has findings of this severity with these codes."""
    found = {finding.code for finding in report if finding.severity == severity}
    if missing := set(codes) - found:
        pytest.fail("\n".join([f"missing: {missing}", *map(str, (each for each in report if each.severity != "ok"))]))


Start = Callable[..., Run]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with rabbitmq_cluster.running() as made:
        yield made


@pytest.fixture
def separable() -> Iterator[Cluster]:
    """A cluster whose nodes can be cut off from each other."""
    if why := rabbitmq_cluster.why_no_partition():
        TABLES["a partition of a RabbitMQ cluster"] = [f"not played: {why}"]
        pytest.skip(why)
    with rabbitmq_cluster.networks() as networks, rabbitmq_cluster.running(networks=networks) as made:
        yield made


@pytest.fixture
def start(
    connect: Callable[..., str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Start]:
    """Start a run on a cluster, which is well before and after it: start(cluster, client=cluster.nodes[1])."""
    with ExitStack() as stack:

        def run(cluster: Cluster, *, client: Node) -> Run:
            cluster.restore()
            vhost = stack.enter_context(virtual_host(cluster.nodes[0].url))
            stack.callback(cluster.restore)
            # a queue is led by the node on which it is declared
            RabbitMQDelayHook(connect("leader", **vhost.connection)).install(["orders"], create_destinations=True)
            number = cluster.nodes.index(client)
            nodes = [*cluster.nodes[number:], *cluster.nodes[:number]]
            hosts = ",".join(f"{node.host}:{node.port}" for node in nodes)

            def hook(host: str = hosts, **extra: object) -> RabbitMQDelayHook:
                return RabbitMQDelayHook(connect("cluster", **{**vhost.connection_with(**extra), "host": host}))

            receivers = [VirtualHost(node.url, vhost.name).parameters for node in reversed(nodes)]
            return Run(cluster, vhost, Chaos(hook(), receivers, monkeypatch, caplog), hook)

        yield run


def test_each_node_is_killed(cluster: Cluster, start: Start) -> None:
    run = start(cluster, client=cluster.nodes[0])

    def faults() -> None:
        for node in cluster.nodes:
            node.kill()
            time.sleep(3)
            require(run.verify(), "warning", "node-down")
            node.start()

    assert run.play("each node killed in turn", faults, cause=DOWN).early == 0


@pytest.mark.parametrize("client", [0, 1], ids=["the sender's node", "another node"])
def test_the_node_of_the_leaders_is_frozen(cluster: Cluster, start: Start, client: int) -> None:
    run = start(cluster, client=cluster.nodes[client])

    def faults() -> None:
        run.leader.freeze()
        for report in run.last():
            require(report, "warning", "node-down")
        run.leader.thaw()

    name = "leaders' node frozen, sender on another" if client else "leaders' node frozen, sender on it"
    cause = rf"host {run.leader.host}:{run.leader.port}: no login within|or is the host frozen\?"
    assert run.play(name, faults, cause=cause).early == 0


def test_quorum_is_lost_while_sending(cluster: Cluster, start: Start) -> None:
    run = start(cluster, client=cluster.nodes[0])

    def faults() -> None:
        run.other.kill()
        run.third.kill()
        for report in run.last():
            require(report, "warning", "node-down")
        # at first, queues may have leaders that are not missed yet
        require(report, "error", "no-leader")
        run.other.start()

    assert run.play("two of three killed while sending", faults, cause=NO_QUORUM).early == 0


def test_quorum_is_lost_before_the_first_bind(cluster: Cluster, start: Start) -> None:
    run = start(cluster, client=cluster.nodes[0])
    run.other.kill()
    run.third.kill()

    def faults() -> None:
        for report in run.last():
            require(report, "error", "no-leader")
        run.other.start()

    assert run.play("two of three killed before the first bind", faults, cause=NO_QUORUM).early == 0


def uncounted(run: Run, why: str) -> None:
    """Check that nothing takes queues for empty, or counts what it cannot."""
    hook = run.hook()
    for call in (
        lambda: hook.redrive(destinations=["orders"]),
        lambda: hook.redrive(destinations=["orders"], dry_run=True),
        lambda: hook.uninstall(dry_run=True),
    ):
        with pytest.raises(TransportUnavailable, match=rf"how many messages wait is unknown, .*{why}"):
            call()
    assert hook.waiting().messages is None
    assert not run.verify().ok


def stops(run: Run) -> None:
    """Check that a send says within 15 s what is wrong, and ends."""
    began = time.monotonic()
    with pytest.raises((SendFailed, TransportUnavailable), match="quorum") as error:
        run.hook().send(messages("orders", [3000] * 20, prefix="stopped"))
    assert time.monotonic() - began < NAMED
    # the connection's fault, and no message's
    assert isinstance(
        error.value.__cause__ if isinstance(error.value, SendFailed) else error.value, TransportUnavailable
    )


@pytest.mark.parametrize("client", [0, 1], ids=["the sender's node runs", "the sender's node hangs"])
def test_two_of_three_nodes_are_frozen(cluster: Cluster, start: Start, client: int) -> None:
    run = start(cluster, client=cluster.nodes[client])
    run.hook().send(messages("orders", [3000] * 300))
    run.other.freeze()
    run.third.freeze()
    stops(run)
    uncounted(run, "no answer in time")
    cluster.restore()
    eventually(lambda: (run.hook().waiting().messages or 0) >= 300)
    assert run.hook().send(messages("orders", [3000] * 20, prefix="stopped")).sent == 20


def test_two_of_three_nodes_are_killed_while_messages_wait(cluster: Cluster, start: Start) -> None:
    run = start(cluster, client=cluster.nodes[0])
    batch = messages("orders", [5] * 100, prefix="due")
    run.hook().send(messages("orders", [3000] * 300))
    run.other.kill()
    run.third.kill()
    stops(run)
    uncounted(run, "no quorum")
    run.other.start()
    assert run.hook().send(batch).sent == len(batch)
    ids = {message.message_id for message in batch}
    assert ids <= {arrival.message_id for arrival in run.vhost.collect("orders", enough=ids)}


def test_the_leader_is_killed_when_all_is_due(cluster: Cluster, start: Start) -> None:
    run = start(cluster, client=cluster.nodes[1])
    due = datetime.now(timezone.utc) + timedelta(seconds=40)

    def faults() -> None:
        time.sleep((due - datetime.now(timezone.utc)).total_seconds())
        run.leader.kill()
        run.fault_begins()
        require(run.verify(), "warning", "node-down")

    batch = messages("orders", [0] * 3000, start=due)
    assert run.play("leaders killed when 3,000 are due", faults, batch, cause=DOWN).early == 0


def test_the_nodes_are_restarted_one_after_the_other(cluster: Cluster, start: Start) -> None:
    run = start(cluster, client=cluster.nodes[0])

    def faults() -> None:
        for node in cluster.nodes:
            node.stop()
            require(run.verify(), "warning", "node-down")
            node.start()

    assert run.play("rolling restart", faults, cause=DOWN).early == 0


@pytest.mark.parametrize("client", [0, 1], ids=["the sender's node", "another node"])
def test_a_node_is_cut_off(separable: Cluster, start: Start, client: int) -> None:
    """The other nodes are still reached by clients, and so is the node that was cut off."""
    run = start(separable, client=separable.nodes[client])

    def faults() -> None:
        separable.cut_off(run.leader)
        early, late = run.last(GIVEN_UP)
        # until the nodes give each other up, the management API waits for the node that is cut off
        require(early, "error", "no-leader")
        require(late, "warning", "node-down")
        separable.reconnect(run.leader)
        # by default (cluster_partition_handling = ignore) an operator has to start the node again
        separable.restore()

    name = "leaders' node cut off, sender on another" if client else "leaders' node cut off, sender on it"
    assert run.play(name, faults, cause=r"cut off|lost their quorum").early == 0
