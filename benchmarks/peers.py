"""The peers' virtual environment: their current versions, pinned, away from this package's own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

#: The peers and the drivers that they were measured with.
PINS = (
    "procrastinate==3.10.0",
    "pgqueuer==1.6.0",
    "pgmq==1.1.4",  # brings the SQL of the extension, version 1.13
    "psycopg[binary,pool]==3.3.9",
    "asyncpg==0.32.0",
)
FOLDER = Path(__file__).resolve().parent.parent / ".run" / "benchmark-peers"


def python() -> str:
    """Return the interpreter that has the peers, made on first use by pip with the user's own settings."""
    stamp, program = FOLDER / "pins", FOLDER / "bin" / "python"
    wanted = "\n".join((*PINS, sys.version))
    if stamp.exists() and stamp.read_text() == wanted:
        return str(program)
    print(f"installing the peers into {FOLDER} ...", file=sys.stderr, flush=True)
    shutil.rmtree(FOLDER, ignore_errors=True)
    venv.create(FOLDER, with_pip=True, symlinks=True)
    command = [str(program), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PINS]
    subprocess.run(command, check=True)
    stamp.write_text(wanted)
    return str(program)
