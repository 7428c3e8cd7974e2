"""The messages of a store that an operator or a sensor is about: by their ids, or by a filter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from airflow_delayed.criteria import UNSET, passed
from airflow_delayed.errors import InputError
from airflow_delayed.identity import SentBy
from airflow_delayed.message import parse_moment
from airflow_delayed.sources.templated import rendered_text

_TIMES = ("due_from", "due_until")
#: What selects messages, but for ``ids``; the words are those of the hook's methods.
CRITERIA = ("tag", "destination", "deliver_conn_id", *_TIMES, "sent_by")


class SelectsMessages:
    """A base beside Airflow's own, for the parameters ``ids`` and :data:`CRITERIA`, each of which may be a template."""

    #: Which of them were passed; as rendered, or from a mapped task's row, they may be None.
    selected: list[str]

    def select(self, **parameters: object) -> None:
        """Keep the parameters as attributes.

        :raises ValueError: ids and a criterion were passed.
        """
        self.selected = [name for name, value in parameters.items() if value is not UNSET]
        for name, value in parameters.items():
            setattr(self, name, None if value is UNSET else value)
        if "ids" in self.selected and len(self.selected) > 1:
            raise ValueError("give ids= or a filter, and not both")

    def selection(self) -> dict[str, Any]:
        """Return ``ids``, or the criteria of the filter, as a store's methods take them.

        :raises InputError: one of them, as it was rendered, cannot be.
        """
        checked: dict[str, Any] = {}
        for name, value in passed(**{name: getattr(self, name) for name in self.selected}).items():
            if name == "ids":
                checked[name] = message_ids(value)
            elif name == "sent_by":
                checked[name] = sent_by(value)
            else:
                checked[name] = (parse_moment if name in _TIMES else rendered_text)(name, value)
        return checked


def message_ids(value: Any) -> list[str]:
    """Return ids as a list: of a list, one id, or the result of a DelayedSendOperator; or of a list of such results.

    :raises InputError: they are no ids.
    """
    if isinstance(value, Mapping):
        if value.get("message_ids") is None:
            raise InputError(
                "ids= is a dictionary without message_ids; a DelayedSendOperator of over 100 messages does not name"
                " them. Pass sent_by= or tag= instead"
            )
        value = value["message_ids"]
    if isinstance(value, str):
        if not value.strip() or value.startswith("["):
            raise InputError(
                f"ids={value!r} is a text, and no id; pass a list, or the other task's output itself instead of a"
                " template"
            )
        value = [value]
    if not isinstance(value, Iterable):
        raise InputError(f"ids= is a {type(value).__name__}, and must be a list of ids")
    ids: list[str] = []
    for one in value:
        if isinstance(one, Mapping):
            # of a mapped send
            ids += message_ids(one)
        elif isinstance(one, str) and one:
            ids.append(one)
        else:
            raise InputError(f"ids= has a {type(one).__name__}, or an empty text, among them; each id is a text")
    # an id in two parts would be counted twice
    return list(dict.fromkeys(ids))


def sent_by(value: SentBy | Mapping[str, Any]) -> SentBy:
    """Return the tasks whose messages are selected.

    :raises InputError: the dictionary has no ``dag_id``, or other keys than those of SentBy, or a value is empty.
    """
    if isinstance(value, SentBy):
        return value
    known = [field.name for field in fields(SentBy)]
    if not isinstance(value, Mapping) or "dag_id" not in value or set(value) - set(known):
        raise InputError(f"sent_by= must be a dictionary with dag_id, and may have {', '.join(known[1:])}")
    criteria: dict[str, Any] = {}
    for name in value:
        if value[name] is None:
            raise InputError(f"sent_by= has None as its {name}; leave it out to select all")
        criteria[name] = rendered_text(f"sent_by {name}", value[name])
    if "map_index" in criteria:
        try:
            criteria["map_index"] = int(criteria["map_index"])
        except ValueError:
            raise InputError(f"sent_by= has {criteria['map_index']!r} as its map_index, which is no number") from None
    return SentBy(**criteria)
