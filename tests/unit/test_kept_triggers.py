"""Deferred tasks and watchers survive an update: what each release has stored of a trigger is understood for ever.

A file in ``kept/`` for each trigger has an entry for each release that changed its arguments. Entries are added, and
never changed.
"""

from __future__ import annotations

import inspect
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from airflow.models.trigger import Trigger
from airflow.triggers.base import BaseTrigger

from airflow_delayed import compat
from airflow_delayed.provider_info import get_provider_info

FOLDER = Path(__file__).with_name("kept")
#: For tests, and not stored; and what only a later Airflow takes.
UNSTORED = {"self", "clock", "sleep"} | (set() if compat.TRIGGERER_QUEUES else {"triggerer_queue"})


def kept(name: str) -> list[dict[str, Any]]:
    """Return what is kept of the trigger of a module."""
    found: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def triggers() -> dict[str, type[BaseTrigger]]:
    """Return the trigger of each module that the provider names."""
    names = [name for entry in get_provider_info()["triggers"] for name in entry["python-modules"]]
    found = {}
    for name in names:
        classes = inspect.getmembers(import_module(name), inspect.isclass)
        (found[name.rpartition(".")[2]],) = [
            one for _, one in classes if issubclass(one, BaseTrigger) and one.__module__ == name
        ]
    return found


def test_every_trigger_is_kept_and_nothing_else():
    assert sorted(triggers()) == sorted(file.stem for file in FOLDER.iterdir())


@pytest.mark.parametrize(("name", "trigger"), triggers().items())
def test_what_each_release_has_stored_is_understood(name, trigger):
    for entry in kept(name):
        given = Trigger._decrypt_kwargs(json.dumps(entry["kwargs"]))
        path, stored = trigger(**given).serialize()
        assert path == f"{trigger.__module__}.{trigger.__qualname__}"
        assert given.keys() <= stored.keys()
        again = trigger(**Trigger._decrypt_kwargs(Trigger.encrypt_kwargs(stored)))
        assert again.serialize() == (path, stored)


@pytest.mark.parametrize(("name", "trigger"), triggers().items())
def test_all_that_is_stored_now_is_kept_and_releases_have_only_added(name, trigger):
    *earlier, newest = [entry["kwargs"] for entry in kept(name)]
    parameters = inspect.signature(trigger.__init__).parameters.values()
    stored = {one.name for one in parameters if one.kind is not one.VAR_KEYWORD} - UNSTORED
    assert newest.keys() == stored, f"add an entry to {FOLDER.name}/{name}.json with the arguments of this release"
    assert trigger(**newest).serialize()[1] == newest
    for one in earlier:
        assert one.keys() <= newest.keys()
