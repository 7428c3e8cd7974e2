"""The policy that leads what no destination took into a queue of ours, on a topology that others declare too."""

from __future__ import annotations

from airflow_delayed.delivery import Finding, State
from airflow_delayed.rabbitmq.facts import Facts, PolicyFacts
from airflow_delayed.rabbitmq.topology import Topology


def policy(topology: Topology) -> PolicyFacts:
    """Return the policy that is wanted; its name is that of the exchange and the queue to which it leads."""
    name = topology.unroutable_queue
    pattern = f"^{topology.delivery_exchange.replace('.', '[.]')}$"
    return PolicyFacts(name=name, pattern=pattern, apply_to="exchanges", definition={"alternate-exchange": name})


def compare(topology: Topology, facts: Facts) -> Finding:
    """Say whether the policy is there, or another one in its way.

    :param facts: with the policies.
    """
    wanted = policy(topology)
    for there in facts.applied(topology.delivery_exchange, "exchanges"):
        if there.definition.get("alternate-exchange") == wanted.name:
            return Finding(state=State.OK, resource=str(there))
        if not there.operator and there.name != wanted.name:
            return Finding(
                state=State.DIFFERS,
                resource=f"exchange {topology.delivery_exchange}",
                argument="policy",
                wanted=wanted.name,
                found=f"{there.name}; one policy alone applies, so add alternate-exchange {wanted.name} to it",
                code="policy",
            )
    return Finding(state=State.MISSING, resource=str(wanted))
