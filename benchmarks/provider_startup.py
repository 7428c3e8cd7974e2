"""What the provider's metadata adds to Airflow's start: with its entry points and without, in turn.

    python benchmarks/provider_startup.py [--rounds 15]

Each start is a process of its own, as a component of Airflow or its command line is: it imports Airflow, and reads of
all installed providers what they have: configuration, connection types and their forms, hooks, extra links, triggers,
commands, plugins. "Without" hides this distribution, and nothing else, from importlib.metadata; "with" looks
through the same sieve and hides nothing. The two take turns in going first.

The claim: less than 50 ms (the limit printed). Differences are of the pairs of a round, median, and of the lowest of
all; by CPU time, for that is what a busy machine leaves alone. The part that reads the metadata is told beside the
whole start, of which it is the only part that differs, and which is noisier. As a scale: another provider hidden
likewise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

OURS, PEER = "airflow-provider-delayed", "apache-airflow-providers-amazon"
LIMIT = 0.05
VARIANTS = {"with all": "", f"without {OURS}": OURS, f"without {PEER}": PEER}


def hide(metadata: Any, hidden: str) -> None:
    """Let a module of installed distributions know nothing of one."""
    found = metadata.distributions
    metadata.distributions = lambda **where: [one for one in found(**where) if one.metadata["Name"] != hidden]


def start(hidden: str) -> dict[str, float]:
    """Do what a start does, in this process; return the seconds of CPU of its parts."""
    # before Python 3.12 Airflow asks the backport
    names = ("importlib.metadata", "importlib_metadata")
    for module in (import_module(name) for name in names if find_spec(name)):
        hide(module, hidden)
    began = time.process_time()
    import airflow.configuration  # noqa: F401
    from airflow import plugins_manager
    from airflow.providers_manager import ProvidersManager
    from airflow.sdk.providers_manager_runtime import ProvidersManagerTaskRuntime

    imported = time.process_time()
    manager = ProvidersManager()
    manager.initialize_providers_configuration()
    told = [
        manager.providers,
        manager.provider_configs,
        dict(manager.connection_form_widgets),
        manager.field_behaviours,
        manager.extra_links_class_names,
        manager.trigger,
        manager.cli_command_functions,
        dict(ProvidersManagerTaskRuntime().hooks),
        plugins_manager.get_plugin_info(),
    ]
    ended = time.process_time()
    assert told
    assert (OURS in manager.providers) == (hidden != OURS)
    return {"metadata": ended - imported, "start": ended - began}


def ask(hidden: str, home: str) -> dict[str, float]:
    """Do it in a process of its own."""
    env = {**os.environ, "AIRFLOW_HOME": home, "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), env.get("PYTHONPATH", "")])
    command = [sys.executable, __file__, "--start", hidden]
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--start", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.start is not None:
        print("\n" + json.dumps(start(arguments.start)))
        return
    with tempfile.TemporaryDirectory() as home:
        names = list(VARIANTS)
        for hidden in VARIANTS.values():
            ask(hidden, home)  # compiles what is not yet, and makes airflow.cfg
        rounds: list[dict[str, dict[str, float]]] = []
        for number in range(arguments.rounds):
            turn = number % len(names)
            rounds.append({name: ask(VARIANTS[name], home) for name in names[turn:] + names[:turn]})
    print(f"{arguments.rounds} rounds, milliseconds of CPU, median (lowest to highest)")
    for part in ("metadata", "start"):
        for name in names:
            tell(f"{part}, {name}", [one[name][part] for one in rounds])
        for name in names[1:]:
            tell(f"{part}: added by {VARIANTS[name]}", [one[names[0]][part] - one[name][part] for one in rounds])
    added = statistics.median(one[names[0]]["metadata"] - one[names[1]]["metadata"] for one in rounds)
    lowest = [min(one[name]["metadata"] for one in rounds) for name in names]
    print(f"\n  of the lowest: added by {OURS} {1000 * (lowest[0] - lowest[1]):.1f} ms")
    print(f"added {added * 1000:.1f} ms; limit {LIMIT * 1000:.0f} ms: {'kept' if added < LIMIT else 'MISSED'}")


def tell(what: str, seconds: list[float]) -> None:
    low, middle, high = (1000 * value for value in (min(seconds), statistics.median(seconds), max(seconds)))
    print(f"  {what:60} {middle:8.1f} ({low:.1f} to {high:.1f})")


if __name__ == "__main__":
    main()
