"""The notifiers of a DAG, kept in its serialized form, where the listener finds them without the DAG's file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from airflow_delayed.notifications.missed_run import MissedRunNotifier
from airflow_delayed.notifications.notifiers import DelayedCancelNotifier, DelayedNotifier, StoreNotifier

if TYPE_CHECKING:
    from airflow.sdk import DAG

#: The key among a DAG's default_args that has its notifiers, as JSON. No operator has a parameter of this name.
NOTIFIERS = "airflow_delayed.notifiers"

#: When Airflow calls a callback: as the state of a run, or of a task instance.
State = Literal["success", "failed"]
_CALLBACKS: Mapping[State, str] = {"success": "on_success_callback", "failed": "on_failure_callback"}
_CLASSES: Mapping[str, type[StoreNotifier]] = {
    one.__name__: one for one in (DelayedNotifier, DelayedCancelNotifier, MissedRunNotifier)
}


def check_and_keep(dag: DAG, *, keep: bool) -> None:
    """Check the notifiers of a DAG that was parsed.

    :param keep: whether to keep them, too.
    :raises AirflowClusterPolicyViolation: a notifier cannot do its work for this DAG; that is an import error.
    """
    found = list(notifiers_of(dag))
    for task_id, state, notifier in found:
        notifier.check_dag(dag, task_id, state)
    if keep and found:
        dag.default_args = {**dag.default_args, NOTIFIERS: _written(found)}


def notifiers_of(dag: DAG) -> Iterator[tuple[str | None, State, StoreNotifier]]:
    """Yield the notifiers of a DAG and of its tasks, each with the task and the state."""
    for owner in (dag, *dag.tasks):
        for state, name in _CALLBACKS.items():
            callbacks = getattr(owner, name, None) or ()
            for one in callbacks if isinstance(callbacks, list | tuple) else (callbacks,):
                if isinstance(one, StoreNotifier):
                    yield getattr(owner, "task_id", None), state, one


def _written(found: Sequence[tuple[str | None, State, StoreNotifier]]) -> str:
    """Return notifiers as JSON: each distinct one once, and which owner has which of them."""
    numbers: dict[str, int] = {}
    owners: dict[str, dict[str, list[int]]] = {}
    for task_id, state, notifier in found:
        if (kept := notifier.kept()) is not None:
            number = numbers.setdefault(json.dumps(kept, sort_keys=True), len(numbers))
            # no task has an empty name
            owners.setdefault(task_id or "", {}).setdefault(state, []).append(number)
    return json.dumps({"notifiers": [json.loads(one) for one in numbers], "owners": owners}, sort_keys=True)


def kept_notifiers(text: str, task_id: str | None, state: str) -> list[StoreNotifier]:
    """Return the notifiers of a DAG, or of a task in it, for a state.

    :param text: as it is kept in the serialized DAG.
    """
    read: dict[str, Any] = json.loads(text)
    wanted = read["owners"].get(task_id or "", {}).get(state, ())
    return [_CLASSES[one["class"]].of_kept(one) for number in wanted if (one := read["notifiers"][number])]
