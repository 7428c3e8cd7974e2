"""Debian packages that a server needs, installed when they are missing."""

from __future__ import annotations

import os
import subprocess
import sys


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
    # a server that the package starts by itself would take the standard port; policy-rc.d says no to that
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    _run(["apt-get", "update", "-qq"], env)
    _run(command, env)
    if not (shutil.which(program) or os.access(program, os.X_OK)):
        raise SystemExit(f"{' '.join(packages)} is installed, but {program} is not there; is this a Debian 12?")


def _run(command: list[str], env: dict[str, str]) -> None:
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}")
