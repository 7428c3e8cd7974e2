"""Judging a cluster: do its nodes run, and has each queue a leader and enough members?

Facts in, findings out; only :class:`SilenceCheck` asks for facts by itself, while a send gets no confirm.

A quorum queue works while a majority of its members runs, and lets messages in and out by one of them, its leader.
Without a leader a passive declare counts 0 messages, whatever waits in the queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from airflow_delayed.delivery import Finding, State
from airflow_delayed.errors import TransportUnavailable, some
from airflow_delayed.rabbitmq.connection import host_name, login_problems
from airflow_delayed.rabbitmq.management import Facts, QueueFacts, list_queues
from airflow_delayed.threads import in_thread

if TYPE_CHECKING:
    from pika.connection import Parameters

#: States of a queue of which no process runs. Without a member that runs, RabbitMQ 3.10 has no state for it.
_DOWN = frozenset(["down", "stopped", "crashed"])
#: Members that a queue should have, if the cluster has so many nodes: with three, one may fail.
_MEMBERS = 3
#: Seconds without a confirm until a send asks why, seconds of them at the present host, and seconds for each answer.
_CHECK_AFTER, _HOST_AFTER, _CHECK_SECONDS = 5.0, 1.0, 2.0
_LOST = (
    "queues have lost their quorum, or a node hangs; let nodes that hang go on, or kill them, and start nodes that do"
    " not run"
)


def is_down(queue: QueueFacts) -> bool:
    """Whether no node runs that has the queue."""
    return queue.state in _DOWN or (bool(queue.members) and not queue.online)


def lacks_quorum(queue: QueueFacts) -> bool:
    """Whether some members run, and not the majority that a queue needs; RabbitMQ 3.10 has no state for that."""
    return queue.state == "minority" or 0 < len(queue.online) <= len(queue.members) // 2


def lacks_leader(queue: QueueFacts) -> bool:
    """Whether no member leads the queue, be it that too few of them run, or that they have elected none yet."""
    return bool(queue.members) and not queue.leader


def unavailable(queues: Iterable[QueueFacts]) -> list[QueueFacts]:
    """Return the queues through which no message passes, and whose messages nobody can count."""
    return [queue for queue in queues if is_down(queue) or lacks_quorum(queue) or lacks_leader(queue)]


def require_available(conn_id: str, facts: Facts, names: Iterable[str], then: str) -> None:
    """Check that the messages of these queues can be counted, as far as the management API shows it.

    :param then: what was not done, as a sentence.
    :raises TransportUnavailable: a queue has no leader, or too few of its members run; or the management API is there
        and did not answer in time.
    """
    blocked = list(map(str, uncounted(facts, names)))
    if blocked:
        raise TransportUnavailable(
            f"connection {conn_id!r}: how many messages wait is unknown, for AMQP counts 0 in a queue without a"
            f" leader. {some(blocked, separator='. ')}. {then}"
        )


def uncounted(facts: Facts, names: Iterable[str]) -> list[Finding]:
    """Return why the messages in these queues cannot be counted; empty if they can, or if there is no management API.

    AMQP counts 0 in a queue whose leader hangs, as in a queue without a leader.
    """
    if facts.silent:
        return [_silent(facts)]
    known = facts.queues or {}
    return list(_blocked([known[name] for name in names if name in known]))


def _silent(facts: Facts) -> Finding:
    return Finding(
        state=State.BLOCKED,
        resource="queues",
        found=f"{facts.why}; whether they have leaders is unknown, and so is how many messages wait",
        code="no-leader",
        remedy="the node that hangs answers no rabbitmq-diagnostics ping: let it go on, or kill it and start it again",
    )


def judge(queues: Sequence[QueueFacts], levels: Sequence[str], facts: Facts) -> Iterator[Finding]:
    """Judge the nodes, and the queues that messages need.

    :param queues: those queues that are there.
    :param levels: the names of the delay levels' queues.
    """
    if facts.nodes is None:
        # without a list of queues there is no management API, whatever the user's rights are
        needs = "" if facts.queues is None else "; the list of nodes needs the tag monitoring"
        yield Finding(
            state=State.UNKNOWN,
            resource="nodes of the cluster",
            found=f"{facts.why}{needs}",
            code="node-down",
            remedy="rabbitmqctl set_user_tags <user> monitoring" if needs else None,
        )
    elif down := sorted(name for name, runs in facts.nodes.items() if not runs):
        yield Finding(
            state=State.WARNING,
            resource=f"node{'s' if len(down) > 1 else ''} {some(down, separator=', ')}",
            found="does not run, or the other nodes cannot reach it",
            code="node-down",
            remedy=f"{_start(down)}; a node that will not come back, while more than half of the nodes run: rabbitmqctl"
            f" forget_cluster_node {down[0]}",
        )
    if facts.silent:
        yield _silent(facts)
    elif facts.queues is None:
        yield Finding(
            state=State.UNKNOWN, resource="leaders and members of the queues", found=facts.why, code="no-leader"
        )
    yield from judge_queues(queues, levels, facts.nodes)


def judge_queues(
    queues: Sequence[QueueFacts], levels: Iterable[str], nodes: Mapping[str, bool] | None = None
) -> Iterator[Finding]:
    """Judge queues by their states; one finding for each condition.

    :param levels: the names of the delay levels' queues.
    :param nodes: whether each node runs; None: nodes are known as far as queues have members there.
    """
    yield from _blocked(queues)
    blocked = {queue.name for queue in unavailable(queues)}
    working = [queue for queue in queues if queue.members and queue.name not in blocked]
    yield from _offline([queue for queue in working if len(queue.online) < len(queue.members)])
    names = sorted(nodes if nodes is not None else {name for queue in queues for name in queue.members})
    few = [queue for queue in queues if 0 < len(queue.members) < min(_MEMBERS, len(names))]
    if few:
        yield _few_members(few, names)
    names_of_levels = set(levels)
    yield from _one_leader([queue for queue in working if queue.name in names_of_levels and len(queue.members) > 1])


def _blocked(queues: Sequence[QueueFacts]) -> Iterator[Finding]:
    yield from _lost(queues)
    yield from _leaderless(queues)


def _lost(queues: Sequence[QueueFacts]) -> Iterator[Finding]:
    """Report queues that no election helps: too few of their nodes run."""
    down = list(filter(is_down, queues))
    if down:
        yield Finding(
            state=State.BLOCKED,
            resource=_resource(down),
            found="down: no node runs that has it, and no message goes in or out",
            code="no-leader",
            remedy=_start(_absent(down)),
        )
    minority = [queue for queue in queues if lacks_quorum(queue) and not is_down(queue)]
    if minority:
        absent = _absent(minority)
        yield Finding(
            state=State.BLOCKED,
            resource=_resource(minority),
            found=f"no quorum: half of the members or more do not run ({some(absent, separator=', ')}), and no message"
            " goes in or out",
            code="no-leader",
            remedy=f"{_start(absent)}; a majority of the members has to run",
        )


def _leaderless(queues: Sequence[QueueFacts]) -> Iterator[Finding]:
    leaderless = [q for q in queues if lacks_leader(q) and not lacks_quorum(q) and not is_down(q)]
    if leaderless:
        yield Finding(
            state=State.BLOCKED,
            resource=_resource(leaderless),
            found="no leader, though a majority of the members runs; no message goes in or out",
            code="no-leader",
            remedy="an election takes seconds; if it lasts, rabbitmq-queues quorum_status"
            f" {leaderless[0].name} shows each member, and the log of its node the cause",
        )


def _offline(queues: Sequence[QueueFacts]) -> Iterator[Finding]:
    if queues:
        absent = _absent(queues)
        yield Finding(
            state=State.WARNING,
            resource=_resource(queues),
            found=f"members do not run ({some(absent, separator=', ')}); when more fail, no message goes in or out",
            code="node-down",
            remedy=_start(absent),
        )


def _few_members(queues: Sequence[QueueFacts], nodes: Sequence[str]) -> Finding:
    least, wanted = min(len(queue.members) for queue in queues), min(_MEMBERS, len(nodes))
    without = [name for name in nodes if any(name not in queue.members for queue in queues)]
    return Finding(
        state=State.WARNING,
        resource=_resource(queues),
        found=f"{least} member{'s' if least > 1 else ''}, in a cluster of {len(nodes)} nodes; when one node fails, no"
        " message goes in or out",
        code="node-down",
        remedy=f"{', '.join(f'rabbitmq-queues grow {name} all' for name in without)} (--vhost-pattern and"
        f" --queue-pattern choose the queues), until each has {wanted} members",
    )


def _one_leader(levels: Sequence[QueueFacts]) -> Iterator[Finding]:
    leaders = {queue.leader for queue in levels}
    if len(levels) > 1 and len(leaders) == 1:
        yield Finding(
            state=State.WARNING,
            resource=_resource(levels),
            found=f"all are led by {leaders.pop()}: it has all the work, and when it fails all stop until new leaders"
            " are elected",
            code="node-down",
            remedy="rabbitmq-queues rebalance quorum, when no other finding is left; for queues to come,"
            " queue_leader_locator = balanced in rabbitmq.conf",
        )


def _resource(queues: Sequence[QueueFacts]) -> str:
    names = [queue.name for queue in queues]
    return f"queue {names[0]}" if len(names) == 1 else f"{len(names)} queues ({some(names, separator=', ')})"


def _absent(queues: Iterable[QueueFacts]) -> list[str]:
    """Return the nodes on which members of these queues do not run, or the node of a classic queue."""
    absent: set[str] = set()
    for queue in queues:
        absent |= set(queue.members) - set(queue.online)
        if not queue.members and queue.node:
            absent.add(queue.node)
    return sorted(absent)


def _start(nodes: Sequence[str]) -> str:
    return f"start {some(nodes, separator=', ')}" if nodes else "start the node that has it"


# -- while a send gets no confirm --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostAnswers:
    """What the hosts of a connection answer at one moment.

    :param problems: of each host the problem of a login there; None if there is none.
    :param facts: the queues, or why the management API does not show them.
    """

    problems: Mapping[str, str | None]
    facts: Facts

    @classmethod
    def ask(cls, hosts: Sequence[Parameters]) -> HostAnswers:
        """Ask all hosts at once, which takes a few seconds at most.

        :raises ValueError: the address of the management API cannot be read.
        """
        url: str | None = getattr(hosts[0], "management_url", None)
        with ThreadPoolExecutor(1 + len(hosts)) as pool:
            logins = pool.submit(login_problems, hosts, seconds=_CHECK_SECONDS)
            listed = list(pool.map(lambda host: list_queues(host, url, _CHECK_SECONDS), hosts[:1] if url else hosts))
            problems = dict(zip(map(host_name, hosts), logins.result(), strict=True))
        best = max(listed, key=lambda facts: (facts.queues is not None, facts.silent))
        return cls(problems, best)

    def quorum_lost(self, host: str, queues: Iterable[str]) -> str | None:
        """Return why messages to these queues are not confirmed over a host; None if it is not certain that they wait.

        A queue that has only lost its leader elects another one within seconds.
        """
        if self.facts.queues is not None:
            known = [self.facts.queues[name] for name in queues if name in self.facts.queues]
            return ". ".join(map(str, _lost(known))) or None
        others = [f"{name}: {problem}" for name, problem in self.problems.items() if problem]
        alone = self.problems[host] is None and len(others) == len(self.problems) - 1
        # with a host or two, the others may be those of the cluster that are not listed
        if not alone or not (self.facts.silent or len(self.problems) >= _MEMBERS):
            return None
        only = f"of {len(self.problems)} hosts this one alone answers ({some(others)})" if others else None
        causes = [cause for cause in (only, self.facts.why if self.facts.silent else None) if cause]
        return f"{'; '.join(causes)}: {_LOST}"

    def only_others(self, host: str) -> bool:
        """Whether other hosts answer, and this one does not."""
        return self.problems[host] is not None and None in self.problems.values()


class SilenceCheck:
    """Asks in a thread why a host confirms nothing, again and again while it does not.

    :param hosts: of the connection.
    """

    def __init__(self, hosts: Sequence[Parameters]) -> None:
        self._hosts = hosts
        self._asked: Future[HostAnswers] | None = None
        self._asked_at = 0.0
        self._answers: HostAnswers | None = None

    def look(self, seconds: float, here: float, timeout: float) -> HostAnswers | None:
        """Return the newest answers; None if there are none yet, or if messages were confirmed meanwhile.

        :param seconds: without a confirm.
        :param here: seconds since the present host was connected to.
        :param timeout: seconds without a confirm until the send ends in any case.
        """
        after = min(_CHECK_AFTER, timeout / 4)
        if seconds < after or here < min(_HOST_AFTER, timeout / 20):
            self._asked = self._answers = None
            return None
        if self._asked is not None and self._asked.done():
            self._answers = None if self._asked.exception() else self._asked.result()
        if self._asked is None or (self._asked.done() and seconds - self._asked_at >= after):
            self._asked_at = seconds
            self._asked = in_thread(partial(HostAnswers.ask, self._hosts), "delayed-silence-check")
        return self._answers
