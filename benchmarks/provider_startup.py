"""What the provider's metadata adds to Airflow's start: with its entry points and without, in turn.

    python benchmarks/provider_startup.py [--rounds 15]

When it starts, a component of Airflow, or its command line, reads of all installed providers what they have:
configuration, connection types, hooks, extra links, triggers, commands, plugins; and imports what it needs for that. (A
hook itself it imports when a connection is used.) Here a process forks for each start, and the child imports Airflow
and reads it all. What Airflow loads of others, such as SQLAlchemy, the process has loaded before: it is the same for
all, and would only blur what differs. "Without" hides one distribution, and nothing else, from importlib.metadata;
"with" looks through the same sieve. They take turns in going first.

The claim: less than 50 ms (the limit printed), by CPU time, for that is what a busy machine leaves alone, more or less.
It is measured twice: beside all other providers, some of which import what ours would otherwise; and beside those
alone that Airflow cannot do without, which is a larger and a surer figure, since the rest is quieter. As a scale: the
amazon provider, hidden likewise.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any

OURS, PEER = "airflow-provider-delayed", "apache-airflow-providers-amazon"
LIMIT = 50.0
#: Airflow's own dependencies among the providers, and ours.
FEW = {f"apache-airflow-providers-{name}" for name in ("common-compat", "common-io", "common-sql", "smtp", "standard")}

Shown = Callable[[str], bool]
STARTS: dict[str, Shown] = {
    "all": lambda name: True,
    "all but ours": lambda name: name != OURS,
    "all but amazon": lambda name: name != PEER,
    "few and ours": lambda name: not is_provider(name) or name in {*FEW, OURS},
    "few": lambda name: not is_provider(name) or name in FEW,
}
DIFFERENCES = {
    "ours adds, beside all": ("all", "all but ours"),
    "amazon adds, beside all": ("all", "all but amazon"),
    "ours adds, beside few": ("few and ours", "few"),
}


def is_provider(name: str) -> bool:
    return name == OURS or name.startswith("apache-airflow-providers-")


def sift(shown: Shown) -> None:
    """Show those distributions alone; before Python 3.12 Airflow asks the backport."""
    for name in ("importlib.metadata", "importlib_metadata"):
        if find_spec(name):
            metadata: Any = import_module(name)
            found = metadata.distributions
            metadata.distributions = lambda found=found, **where: [
                one for one in found(**where) if shown(one.metadata["Name"] or "")
            ]


def start(shown: Shown) -> float:
    """Import Airflow, and read what the providers have; return the milliseconds of CPU."""
    sift(shown)
    began = time.process_time()
    from airflow import plugins_manager
    from airflow.providers_manager import ProvidersManager
    from airflow.sdk.providers_manager_runtime import ProvidersManagerTaskRuntime

    manager = ProvidersManager()
    manager.initialize_providers_configuration()
    figures = [
        manager.provider_configs,
        manager.hooks,
        manager.extra_links_class_names,
        manager.trigger,
        manager.cli_command_functions,
        ProvidersManagerTaskRuntime().hooks,
        plugins_manager.get_plugin_info(),
    ]
    ended = time.process_time()
    assert figures
    for name in (OURS, PEER):
        assert (name in manager.providers) == shown(name), name
    return (ended - began) * 1000


def loaded(shown: Shown) -> list[str]:
    """Do the same; return the modules of others that it loaded."""
    start(shown)
    return [name for name in sys.modules if name.partition(".")[0] not in ("airflow", "airflow_delayed", "__main__")]


def forked(work: Callable[[Shown], Any], shown: Shown) -> Any:
    """Do it in a child of this process."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        with os.fdopen(writing, "w") as pipe:
            json.dump(work(shown), pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ.update(AIRFLOW_HOME=home, AIRFLOW__LOGGING__LOGGING_LEVEL="ERROR")
        names = list(STARTS)
        for name in forked(loaded, STARTS["few"]):
            with suppress(ImportError):  # a name that only its parent makes
                import_module(name)
        # or one collection of garbage more, or less, would be the larger part of a difference
        gc.freeze()
        for name in names:
            forked(start, STARTS[name])  # compiles what is not yet
        rounds = []
        for number in range(arguments.rounds):
            turn = number % len(names)
            rounds.append({name: forked(start, STARTS[name]) for name in names[turn:] + names[:turn]})
    print(f"{arguments.rounds} rounds, milliseconds of CPU: median (lowest to highest)")
    for name in names:
        tell(f"start with {name}", [one[name] for one in rounds])
    for what, (one_with, one_without) in DIFFERENCES.items():
        middle = tell(what, [one[one_with] - one[one_without] for one in rounds])
        lowest = min(one[one_with] for one in rounds) - min(one[one_without] for one in rounds)
        print(f"    of the lowest of both: {lowest:.1f}")
    print(f"\nours adds {middle:.1f} ms beside few; limit {LIMIT:.0f} ms: {'kept' if middle < LIMIT else 'MISSED'}")


def tell(what: str, values: list[float]) -> float:
    middle = statistics.median(values)
    print(f"  {what:26} {middle:8.1f} ({min(values):.1f} to {max(values):.1f})")
    return middle


if __name__ == "__main__":
    main()
