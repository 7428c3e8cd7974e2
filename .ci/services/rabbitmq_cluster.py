"""A cluster of three RabbitMQ nodes from Debian's package, whose nodes can be killed, frozen and cut off.

By default all nodes listen on the loopback address. A cluster that can be partitioned gives each node a network
namespace with an address of its own behind a bridge, so that a node can be cut off from the others while clients still
reach it. Only root may make these, and the kernel has to permit them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from services import packages, process, rabbitmq
from services.rabbitmq import Broker

SIZE = 3
#: By default guest may log in from the node's own loopback address alone.
_CONFIGURATION = ("cluster_formation.peer_discovery_backend = classic_config", "loopback_users = none")
#: An Ethernet address that no interface has: a packet to it is lost without an answer.
_NOWHERE = "02:00:00:00:00:fe"
_INTERFACE = "eth0"
#: A node's name in an Erlang list.
_NAME = r"[^'\[,\s]+@[^'\],\s]+"
#: Its name since RabbitMQ 3.12, and the one before that.
_RUNNING_NODES = (
    "case erlang:function_exported(rabbit_nodes, list_running, 0) of"
    " true -> rabbit_nodes:list_running(); false -> rabbit_nodes:all_running() end"
)


@dataclass(frozen=True)
class Network:
    """Where a node listens.

    :param namespace: its network namespace; None: the machine's own network.
    """

    host: str = rabbitmq.LOOPBACK
    namespace: str | None = None

    @property
    def within(self) -> Sequence[str]:
        """The beginning of a command that runs there."""
        return ["ip", "netns", "exec", self.namespace] if self.namespace else []


class Node(Broker):
    """One node of a cluster. ``stop()``, ``kill()`` and ``start()`` keep its data and its ports."""

    def __init__(self, folder: Path, network: Network) -> None:
        super().__init__(folder, host=network.host)
        self.network = network
        self._within = network.within

    def join(self, nodes: Sequence[Node], cookie: str, epmd_port: int) -> None:
        """Have it form a cluster with these nodes, itself among them, when it starts for the first time."""
        names = [
            f"cluster_formation.classic_config.nodes.{number} = {node.name}" for number, node in enumerate(nodes, 1)
        ]
        with (self.folder / "rabbitmq.conf").open("a") as file:
            file.write("\n".join([*_CONFIGURATION, *names, ""]))
        secret = self.folder / ".erlang.cookie"
        secret.chmod(0o600)
        secret.write_text(cookie)
        secret.chmod(0o400)
        self._environment["ERL_EPMD_PORT"] = str(epmd_port)

    def _name_service(self, stack: contextlib.ExitStack) -> None:
        """Start none: the cluster's own outlives each node."""

    def freeze(self) -> None:
        """Stop its process as it is: its connections stay open, the kernel takes new ones, and it answers nothing."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let its process go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._server, "it was never started"
        process.signal_group(self._server, number)

    def restore(self) -> None:
        """Have it run, whatever was done to it."""
        if self._server is None or process.ended(self._server):
            self.start()
        else:
            self.thaw()
            self.wait_until_ready()


class Cluster:
    """Three nodes, each of which knows the others.

    :param networks: of the nodes.
    """

    def __init__(self, folder: Path, networks: Sequence[Network]) -> None:
        self._folder = folder
        self._epmd_port = process.free_port()
        made = []
        for number, network in enumerate(networks, 1):
            own = folder / str(number)
            own.mkdir()
            made.append(Node(own, network))
        self.nodes: tuple[Node, ...] = tuple(made)
        cookie = os.urandom(16).hex()
        for node in self.nodes:
            node.join(self.nodes, cookie, self._epmd_port)

    @property
    def hosts(self) -> str:
        """The field of an Airflow connection that names all nodes."""
        return ",".join(f"{node.host}:{node.port}" for node in self.nodes)

    def start(self, stack: contextlib.ExitStack) -> None:
        """Start all nodes, which end with a stack, and wait until each serves clients and knows the others."""
        for network in {node.host: node.network for node in self.nodes}.values():
            log = self._folder / "epmd.log"
            stack.enter_context(rabbitmq.epmd(network.host, self._epmd_port, log=log, within=network.within))
        for node in self.nodes:
            stack.callback(node.kill)
            # all at once: each takes part in forming the cluster
            node.launch()
        for node in self.nodes:
            node.wait_until_ready()
        process.wait_for("the cluster", self._whole)

    def members(self, node: Node) -> list[str]:
        """Return the names of the nodes that run, as a node sees it."""
        return re.findall(_NAME, node.eval(_RUNNING_NODES))

    def partitioned_from(self, node: Node) -> list[str]:
        """Return the names of the nodes that a node takes for cut off, until one of them is started again."""
        return re.findall(_NAME, node.eval("rabbit_node_monitor:partitions()"))

    def restore(self) -> None:
        """Have all nodes run and be one cluster, whatever was done to them."""
        for node in self.nodes:
            self.reconnect(node)
        for node in self.nodes:
            node.restore()
        process.wait_for("the cluster", self._heal)

    def lead(self, node: Node, virtual_host: str) -> None:
        """Have a node lead all quorum queues of a virtual host."""
        servers = (
            f'[element(1, amqqueue:get_pid(Q)) || Q <- rabbit_amqqueue:list(<<"{virtual_host}">>),'
            " amqqueue:get_type(Q) =:= rabbit_quorum_queue]"
        )
        move = (
            "length([Leader || Name <- Servers, {ok, _, Leader} <- [ra:members({Name, node()})],"
            " ra:transfer_leadership(Leader, {Name, node()}) =/= already_leader])"
        )
        # one that is being elected moves at the next try
        process.wait_for("leaders", lambda: node.eval(f"Servers = {servers}, {move}") == "0")

    def _heal(self) -> bool:
        """Start a node again that was cut off, and return whether the cluster is whole.

        Nodes note a partition some time after they reach each other again.
        """
        node = max(self.nodes, key=lambda node: len(self.partitioned_from(node)))
        if self.partitioned_from(node):
            # the others have the state of the cluster
            node.kill()
            node.start()
        return self._whole()

    def _whole(self) -> bool:
        return all(len(self.members(node)) == SIZE and not self.partitioned_from(node) for node in self.nodes)

    def cut_off(self, node: Node) -> None:
        """Lose all packets between a node and the other nodes; clients reach all of them."""
        for one, other in self._pairs(node):
            _ip(one, "neighbour", "replace", other.host, "lladdr", _NOWHERE, "nud", "permanent", "dev", _INTERFACE)

    def reconnect(self, node: Node) -> None:
        """Let packets pass again between a node and the others."""
        for one, other in self._pairs(node):
            _ip(one, "neighbour", "flush", "to", other.host, "nud", "permanent", "dev", _INTERFACE)

    def _pairs(self, node: Node) -> Iterator[tuple[Node, Node]]:
        for other in self.nodes:
            if other is not node and node.network.namespace:
                yield node, other
                yield other, node


@contextlib.contextmanager
def running(*, networks: Sequence[Network] = (Network(),) * SIZE) -> Iterator[Cluster]:
    """Run a cluster of one's own until the block ends, however it ends; its data is deleted then."""
    rabbitmq.require()
    folder = Path(tempfile.mkdtemp(prefix="airflow-delayed-cluster-"))
    try:
        folder.chmod(0o755)
        with contextlib.ExitStack() as stack:
            cluster = Cluster(folder, networks)
            cluster.start(stack)
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def why_no_partition() -> str | None:
    """Return why networks of their own cannot be made for nodes here; None if they can."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    name = f"delayed{uuid4().hex[:6]}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"this kernel or container permits no network namespaces: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return None


@contextlib.contextmanager
def networks() -> Iterator[Sequence[Network]]:
    """Make a network namespace for each node until the block ends, behind a bridge by which this process reaches it."""
    packages.require("ip", "iproute2")
    run = uuid4().hex[:6]
    bridge, made = f"dl{run}", []
    # a third number that is rarely taken; a run on the same machine has another one
    prefix = f"10.213.{int(run[:2], 16)}"
    with contextlib.ExitStack() as stack:
        _run("ip", "link", "add", bridge, "type", "bridge")
        stack.callback(_run, "ip", "link", "delete", bridge)
        _run("ip", "address", "add", f"{prefix}.254/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        for number in range(1, SIZE + 1):
            network = Network(f"{prefix}.{number}", f"{bridge}n{number}")
            _run("ip", "netns", "add", network.namespace)
            stack.callback(_run, "ip", "netns", "delete", network.namespace)
            outer = f"{bridge}v{number}"
            _run(
                *["ip", "link", "add", outer, "type", "veth"], *["peer", "name", _INTERFACE, "netns", network.namespace]
            )
            _run("ip", "link", "set", outer, "master", bridge, "up")
            for command in (["link", "set", "lo", "up"], ["link", "set", _INTERFACE, "up"]):
                _run("ip", "-netns", network.namespace, *command)
            _run("ip", "-netns", network.namespace, "address", "add", f"{network.host}/24", "dev", _INTERFACE)
            made.append(network)
        yield made


def _ip(node: Node, *command: str) -> None:
    _run("ip", "-netns", str(node.network.namespace), *command)


def _run(*command: str | None) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")
