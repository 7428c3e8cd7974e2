"""What an interpreter answers that has imported Airflow and nothing of ours: one start for all such questions.

To import Airflow takes seconds. So one process does, and for each question forks a child, in which nothing else has
been asked: ``python -m support.fresh NEIGHBOUR`` prints the answers as JSON.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

#: Where .ci/setup puts another provider that has a connection type ``rabbitmq``.
NEIGHBOUR = str(Path(sys.prefix) / "neighbour")
_LINE = "the answers: "


@pytest.fixture(scope="session", name="fresh")
def fresh_fixture(pytestconfig: pytest.Config) -> dict[str, Any]:
    """The answers by their questions, see ``questions``; the processes of a run ask once."""
    from support import servers

    if (folder := servers.shared_folder(pytestconfig)) is None:
        return _ask()
    with (folder / "fresh.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (file := folder / "fresh.json").exists():
            file.write_text(json.dumps(_ask()))
    answers: dict[str, Any] = json.loads(file.read_text())
    return answers


def _ask() -> dict[str, Any]:
    here = Path(__file__).resolve().parents[2]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (here, here / "tests"))),
        "AIRFLOW__OPERATORS__DEFAULT_DEFERRABLE": "True",
        "AIRFLOW_CONN_BY_RABBITMQ": "rabbitmq://localhost",
        "AIRFLOW_CONN_BY_AMQP": "amqp://localhost",
    }
    command = [sys.executable, "-m", "support.fresh", NEIGHBOUR]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    # Airflow may log there too
    (line,) = (line for line in done.stdout.splitlines() if line.startswith(_LINE))
    answers: dict[str, Any] = json.loads(line.removeprefix(_LINE))
    return answers


def questions(neighbour: str) -> dict[str, Callable[[], object]]:
    """Return all questions by their names."""
    return {
        "the commands": _commands,
        "imported at Airflow's start": _imported_at_start,
        "imported by the plugin": _imported_by_plugin,
        "deferrable by default": _deferrable,
        "beside a neighbour that comes last": lambda: _beside(neighbour, first=False),
        "beside a neighbour that comes first": lambda: _beside(neighbour, first=True),
        "forms with us": lambda: _forms(neighbour, ours=True),
        "forms without us": lambda: _forms(neighbour, ours=False),
    }


def _commands() -> object:
    """Return whether Airflow's program has our commands, and what of ours it has imported for that."""
    from airflow.cli import cli_parser

    there = "delayed" in cli_parser.get_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    return {"there": there, "imported": _ours(sys.modules)}


def _imported_at_start() -> object:
    """Return the packages there are when what Airflow looks at has been imported: links, commands and plugins."""
    from importlib.metadata import entry_points

    from airflow_delayed.provider_info import get_provider_info

    info = get_provider_info()
    modules = {path.rpartition(".")[0] for path in (*info["extra-links"], *info["cli"])}
    modules |= {entry.module for entry in entry_points(group="airflow.plugins") if "airflow_delayed" in entry.module}
    for name in modules:
        importlib.import_module(name)
    return sorted({name.partition(".")[0] for name in sys.modules})


def _imported_by_plugin() -> object:
    """Return the modules that our plugin brings along."""
    import airflow.plugins_manager  # noqa: F401

    before = set(sys.modules)
    import airflow_delayed.ui.plugin  # noqa: F401

    return sorted(set(sys.modules) - before)


def _deferrable() -> object:
    """Return whether a sensor waits in the triggerer, where Airflow's configuration says so."""
    from airflow_delayed.sensors.fifo_cycle import FifoCycleSensor

    return FifoCycleSensor(task_id="t", destination="d").deferrable


def _beside(neighbour: str, *, first: bool) -> object:
    """Return whose the connection type is, when another provider has it too."""
    from airflow.sdk.providers_manager_runtime import ProvidersManagerTaskRuntime

    from airflow_delayed.delivery import delivery_for

    manager = _with_the(neighbour, first=first)
    # by Airflow's own manager, as its UI makes the form
    names = [name for name in manager.connection_form_widgets if name.startswith("extra__rabbitmq__")]
    return {
        "providers": sorted(name for name in manager.providers if "rabbitmq" in name or "delayed" in name),
        "hook": ProvidersManagerTaskRuntime().hooks["rabbitmq"].hook_class_name,  # type: ignore[union-attr]
        "fields": sorted(name.removeprefix("extra__rabbitmq__") for name in names),
        "label": manager.field_behaviours["rabbitmq"]["relabeling"]["schema"],
        "transports": [type(delivery_for(name)).__name__ for name in ("by_rabbitmq", "by_amqp")],
    }


def _forms(neighbour: str, *, ours: bool) -> object:
    """Return the connection forms of all providers, with ours or without."""
    manager = _with_the(neighbour, first=False)
    manager.initialize_providers_list()
    if not ours:
        del manager._provider_dict["airflow-provider-delayed"]
    widgets = sorted(manager.connection_form_widgets)
    return {
        form.connection_type: [form.hook_class_name, form.hook_name, form.field_behaviour]
        + [name for name in widgets if name.startswith(f"extra__{form.connection_type}__")]
        for form in manager.iter_connection_type_hook_ui_metadata()
    }


def _with_the(neighbour: str, *, first: bool) -> Any:
    """Return Airflow's manager of providers, which has looked at the neighbour too."""
    import airflow
    from airflow.providers_manager import ProvidersManager
    from airflow.sdk.providers_manager_runtime import ProvidersManagerTaskRuntime

    sys.path.insert(0 if first else len(sys.path), neighbour)
    airflow.__path__.append(str(Path(neighbour) / "airflow"))
    # Airflow has looked at what is installed, and is to look again
    for known in (ProvidersManager(), ProvidersManagerTaskRuntime()):
        known._cleanup()
    for cached in gc.get_objects():
        if isinstance(cached, functools._lru_cache_wrapper):
            cached.cache_clear()
    return ProvidersManager()


def _ours(modules: Iterable[str]) -> list[str]:
    return sorted(name for name in modules if name.partition(".")[0] == "airflow_delayed")


def _in_a_child(question: Callable[[], object]) -> object:
    reading, writing = os.pipe()
    if not (child := os.fork()):
        status = 1
        # whatever happens, it must not go on as its parent
        with contextlib.suppress(BaseException):
            try:
                answer = question()
                with os.fdopen(writing, "w") as out:
                    out.write(json.dumps(answer))
                status = 0
            except BaseException:
                import traceback

                traceback.print_exc()
                sys.stderr.flush()
        os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as answer_of:
        text = answer_of.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise SystemExit(f"a question had no answer: {question.__name__}")
    return json.loads(text)


def main(neighbour: str) -> None:
    # what all questions need
    importlib.import_module("airflow.providers_manager")
    importlib.import_module("airflow.sdk")
    importlib.import_module("airflow.sdk.providers_manager_runtime")
    # by its entry point Airflow has asked for our metadata
    if early := set(_ours(sys.modules)) - {"airflow_delayed", "airflow_delayed.provider_info"}:
        raise SystemExit(f"Airflow itself has imported what the questions are about: {early}")
    print(_LINE + json.dumps({name: _in_a_child(ask) for name, ask in questions(neighbour).items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
