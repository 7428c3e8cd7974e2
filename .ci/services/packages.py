"""Debian packages that a server needs, installed when they are missing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path


def require(program: str, *packages: str) -> None:
    """Install packages unless the program (an absolute path, or a name on PATH) is there.

    Raises SystemExit with what to type where this cannot be done.
    """
    import shutil

    if shutil.which(program) or os.access(program, os.X_OK):
        return
    command = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise SystemExit(f"{program} is missing. Please run: sudo {' '.join(command)}")
    print(f"installing {' '.join(packages)} ...", file=sys.stderr, flush=True)
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # another installation may be under way; two of ours would also undo each other's policy
    command[1:1] = ["-o", "DPkg::Lock::Timeout=300"]
    with Path(tempfile.gettempdir(), "airflow-delayed-packages.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _run(["apt-get", "-o", "DPkg::Lock::Timeout=300", "update", "-qq"], env)
        with _no_services_started():
            _run(command, env)
    if not (shutil.which(program) or os.access(program, os.X_OK)):
        raise SystemExit(f"{' '.join(packages)} is installed, but {program} is not there; is this a Debian 12?")


def _run(command: list[str], env: dict[str, str]) -> None:
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}")


@contextlib.contextmanager
def _no_services_started(policy: Path = Path("/usr/sbin/policy-rc.d")) -> Iterator[None]:
    """Keep packages from starting their servers, which would take the standard ports.

    Debian asks policy-rc.d before it starts a service; 101 means no. A policy that is there already is left alone.
    """
    try:
        with policy.open("x") as file:
            file.write("#!/bin/sh\nexit 101\n")
    except FileExistsError:
        yield
        return
    try:
        policy.chmod(0o755)
        yield
    finally:
        policy.unlink(missing_ok=True)
