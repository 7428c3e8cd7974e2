"""What is judged of a cluster, by recorded answers of its management API: see answers/README.md."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from airflow_delayed.delivery import Finding, TopologyReport
from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.rabbitmq import cluster
from airflow_delayed.rabbitmq.declare import plan
from airflow_delayed.rabbitmq.management import Facts, Management, QueueFacts
from airflow_delayed.rabbitmq.topology import CELERY
from airflow_delayed.rabbitmq.verify import judge

ANSWERS = Path(__file__).parent / "answers"
#: The topology of the brokers that gave these answers.
RECORDED = replace(CELERY, level_prefix="delayed.level-", level_digits=2, delivery_exchange="delayed.delivery")
CODES = ("node-down", "no-leader")


def recorded(situation: str, who: str = "rabbit@node1") -> Facts:
    """Return the facts that a node's management API shows in a situation; of ``rights`` to a user.

    Exchanges, bindings and policies, which were not recorded, are there and empty.
    """
    found = json.loads((ANSWERS / f"{situation}.json").read_text())
    answers: dict[str, Any] = (found.get("users") or found["management"])[who]
    by_path = {path.partition("?")[0]: answer for path, answer in answers.items()}

    def answer(request: httpx.Request) -> httpx.Response:
        path = request.url.raw_path.decode().removeprefix("/api/").partition("?")[0]
        found = by_path.get(path, {"status": 200, "body": []})
        if "status" not in found:
            raise httpx.ReadTimeout(found["error"])
        body = found["body"]
        if path.startswith("queues/") and found["status"] == 200:
            # the last entry only counts the queues that were cut off
            body = [queue for queue in body if "name" in queue]
        return httpx.Response(found["status"], json=body)

    client = httpx.Client(base_url="http://rabbit.example:15672", transport=httpx.MockTransport(answer))
    with Management(client, "/") as management:
        return management.survey()


def judged(facts: Facts, *destinations: str, top_position: int | None = None) -> list[Finding]:
    parts = plan(RECORDED, destinations)
    counts = {RECORDED.unroutable_queue: 0}
    found = judge(RECORDED, destinations, parts, (), top_position, facts=facts, broker="4.0.5", counts=counts)
    return [finding for finding in found if finding.code in CODES]


def summaries(found: list[Finding]) -> list[tuple[str, str | None, str]]:
    return [(finding.severity, finding.code, finding.resource) for finding in found]


LEVELS = "2 queues (delayed.level-00, delayed.level-16)"
ALL = "3 queues (delayed.level-00, delayed.level-16, orders)"


@pytest.mark.parametrize(
    "situation, node, found",
    [
        ("well", "rabbit@node1", [("warning", "node-down", LEVELS)]),
        (
            "node-down",
            "rabbit@node1",
            [
                ("warning", "node-down", "node rabbit@node3"),
                ("warning", "node-down", ALL),
                ("warning", "node-down", LEVELS),
            ],
        ),
        # new leaders, which have sent no statistics yet
        (
            "leader-down",
            "rabbit@node2",
            [
                ("warning", "node-down", "node rabbit@node1"),
                ("warning", "node-down", ALL),
                ("warning", "node-down", LEVELS),
            ],
        ),
        (
            "minority",
            "rabbit@node1",
            [("warning", "node-down", "nodes rabbit@node2, rabbit@node3"), ("error", "no-leader", ALL)],
        ),
        (
            "minority-later",
            "rabbit@node1",
            [("warning", "node-down", "nodes rabbit@node2, rabbit@node3"), ("error", "no-leader", ALL)],
        ),
        # the API of a healthy node waits for the frozen one, for as long as the nodes take it to run
        (
            "frozen",
            "rabbit@node1",
            [
                ("unknown", "node-down", "nodes of the cluster"),
                ("error", "no-leader", "queues"),
            ],
        ),
        (
            "frozen-later",
            "rabbit@node1",
            [
                ("warning", "node-down", "node rabbit@node2"),
                ("error", "no-leader", "queues"),
            ],
        ),
        ("back", "rabbit@node1", [("warning", "node-down", LEVELS)]),
    ],
)
def test_situations(situation: str, node: str, found: list[tuple[str, str, str]]) -> None:
    assert summaries(judged(recorded(situation, node), "orders")) == found


@pytest.mark.parametrize(
    "situation, node, destination, found",
    [
        ("well", "rabbit@node1", "one-member", [("warning", "node-down")]),
        ("node-down", "rabbit@node1", "last-node", [("error", "no-leader"), ("warning", "node-down")]),
        ("leader-down", "rabbit@node2", "one-member", [("error", "no-leader"), ("warning", "node-down")]),
        ("minority", "rabbit@node1", "last-node", [("error", "no-leader"), ("warning", "node-down")]),
    ],
)
def test_a_destination_with_one_member(
    situation: str, node: str, destination: str, found: list[tuple[str, str]]
) -> None:
    findings = judged(recorded(situation, node), destination, top_position=-1)
    of_queues = [each for each in findings if not each.resource.startswith("node")]
    assert [(each.severity, each.code) for each in of_queues] == found
    assert {each.resource for each in of_queues} == {f"queue {destination}"}


def test_what_is_said_of_a_minority_names_the_nodes_to_start() -> None:
    down, minority = judged(recorded("minority"), "orders")
    assert str(down) == (
        "nodes rabbit@node2, rabbit@node3: does not run, or the other nodes cannot reach it. What to do: start"
        " rabbit@node2, rabbit@node3; a node that will not come back, while more than half of the nodes run:"
        " rabbitmqctl forget_cluster_node rabbit@node2"
    )
    assert str(minority) == (
        f"{ALL}: no quorum: half of the members or more do not run (rabbit@node2, rabbit@node3), and no message goes"
        " in or out. What to do: start rabbit@node2, rabbit@node3; a majority of the members has to run"
    )
    assert not TopologyReport((minority,)).ok


def test_few_members_are_told_with_the_command() -> None:
    (few,) = judged(recorded("well"), "one-member", top_position=-1)
    assert few.found == "1 member, in a cluster of 3 nodes; when one node fails, no message goes in or out"
    assert few.remedy == (
        "rabbitmq-queues grow rabbit@node2 all, rabbitmq-queues grow rabbit@node3 all (--vhost-pattern and"
        " --queue-pattern choose the queues), until each has 3 members"
    )


@pytest.mark.parametrize("user", ["manager", "monitor"])
def test_the_nodes_are_shown_to_users_with_the_tag_monitoring(user: str) -> None:
    nodes, *others = judged(recorded("rights", user), "orders")
    assert summaries(others) == ([("warning", "node-down", LEVELS)] if user == "manager" else [])
    if user == "monitor":
        assert nodes.resource == LEVELS
    else:
        assert (nodes.severity, nodes.code) == ("unknown", "node-down")
        assert nodes.found == (
            "the management API at http://rabbit.example:15672 does not tell this user; the list of nodes needs the"
            " tag monitoring"
        )


def test_an_api_that_does_not_answer_is_not_said_to_refuse() -> None:
    nodes, queues = judged(recorded("frozen"))
    assert nodes.found == (
        "the management API at http://rabbit.example:15672 did not answer all questions: no answer in time; that is so"
        " while a node of its cluster hangs or is cut off"
    )
    assert str(queues.found).startswith(str(nodes.found))


NODES = ("rabbit@a", "rabbit@b", "rabbit@c")


def queue(name: str = "orders", online: int = 3, **fields: Any) -> QueueFacts:
    fields = {"leader": NODES[0], "members": NODES, "online": NODES[:online], **fields}
    return QueueFacts(name=name, type="quorum", **fields)


@pytest.mark.parametrize(
    "facts, says",
    [
        (queue(), None),
        (queue(online=2), None),
        (queue(online=1), "no quorum: "),
        # 4.x states it, and goes on naming the last leader
        (queue(state="minority", online=1), "no quorum: "),
        (queue(online=0), "down: "),
        (queue(state="down", online=0), "down: "),
        (queue(leader=None), "no leader"),
        (queue(members=NODES[:2], online=1), "no quorum: "),
        (queue(members=NODES[:1], online=1), None),
        (QueueFacts(name="classic", state="running", node="rabbit@a"), None),
        (QueueFacts(name="classic", state="down", node="rabbit@a"), "down: "),
        # without statistics, or without the columns
        (QueueFacts(name="new"), None),
    ],
)
def test_a_queue_that_nothing_passes(facts: QueueFacts, says: str | None) -> None:
    errors = [each for each in cluster.judge_queues([facts], []) if each.severity == "error"]
    assert [(each.code, str(says) in str(each.found)) for each in errors] == [("no-leader", True)][: bool(says)]
    assert cluster.unavailable([facts]) == [facts][: bool(says)]
    known = Facts(queues={facts.name: facts})
    if says:
        with pytest.raises(TransportUnavailable, match=r"AMQP counts 0 in a queue without a leader.*Nothing was done"):
            cluster.require_available("rabbit", known, [facts.name, "another"], "Nothing was done")
    else:
        cluster.require_available("rabbit", known, [facts.name, "another"], "Nothing was done")


def test_without_the_management_api_nothing_is_refused() -> None:
    cluster.require_available("rabbit", Facts(why="it is off"), ["orders"], "Nothing was done")


@pytest.mark.parametrize("situation", ["frozen", "frozen-later"])
def test_what_a_silent_management_api_would_list_is_refused(situation: str) -> None:
    with pytest.raises(TransportUnavailable, match=r"unknown.* no answer in time.* rabbitmq-diagnostics ping.*Nothing"):
        cluster.require_available("rabbit", recorded(situation), ["orders"], "Nothing was done")


HOSTS = ("a:5672", "b:5672", "c:5672")


@pytest.mark.parametrize(
    "problems, facts, lost, only_others",
    [
        # the queues' states are certain
        ((None, None, None), recorded("minority"), "no quorum", False),
        ((None, "refused", "refused"), recorded("node-down"), None, False),
        # nodes that hang: the others may still be a majority, also if not all of them are listed
        ((None, "hangs", "hangs"), Facts(silent=True, why="silent"), "of 3 hosts this one alone", False),
        ((None, "hangs", "hangs"), Facts(why="off"), "of 3 hosts this one alone", False),
        ((None, None, "hangs"), Facts(silent=True, why="silent"), None, False),
        ((None, "hangs"), Facts(why="off"), None, False),
        ((None, "hangs"), Facts(silent=True, why="silent"), "silent", False),
        ((None,), Facts(silent=True, why="silent"), "silent", False),
        ((None,), Facts(why="off"), None, False),
        (("hangs",), Facts(silent=True, why="silent"), None, False),
        (("hangs", None, None), Facts(silent=True, why="silent"), None, True),
        (("hangs", "hangs", "hangs"), Facts(silent=True, why="silent"), None, False),
    ],
)
def test_why_a_host_confirms_nothing(
    problems: tuple[str | None, ...], facts: Facts, lost: str | None, only_others: bool
) -> None:
    answers = cluster.HostAnswers(dict(zip(HOSTS, problems, strict=False)), facts)
    found = answers.quorum_lost(HOSTS[0], RECORDED.level_names())
    assert (found is None) if lost is None else (lost in str(found))
    assert answers.only_others(HOSTS[0]) is only_others


def test_thirty_queues_are_one_finding() -> None:
    queues = [queue(name, online=1) for name in RECORDED.level_names()]
    (found,) = cluster.judge_queues(queues, [])
    assert found.resource == (
        "28 queues (delayed.level-00, delayed.level-01, delayed.level-02, delayed.level-03, delayed.level-04, and 23"
        " more)"
    )


@pytest.mark.parametrize(
    "leaders, found",
    [
        ((NODES[0], NODES[0]), ["node-down"]),
        ((NODES[0], NODES[1]), []),
        ((NODES[0],), []),
    ],
)
def test_one_node_leads_all_the_levels(leaders: tuple[str, ...], found: list[str]) -> None:
    queues = [queue(f"level-{number}", leader=leader) for number, leader in enumerate(leaders)]
    names = [each.name for each in queues]
    assert [each.code for each in cluster.judge_queues([*queues, queue()], names)] == found
