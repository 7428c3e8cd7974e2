"""A Java that Spark 4 runs on (17 or newer), installed from Debian when it is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

from services import packages

OLDEST = 17
#: What makes a Java cheap that lives for a minute: one compiler, one collector, and classes that are prepared.
_SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"


def options() -> dict[str, str]:
    """Return the environment of a Java that lives for a minute; a user's own options stay alone."""
    return {"JDK_JAVA_OPTIONS": os.environ.get("JDK_JAVA_OPTIONS", _SHORT_LIVED)}


def require() -> None:
    """Make sure that the java which Spark will take is new enough.

    Raises SystemExit with what to do where it is too old or cannot be installed.
    """
    home = os.environ.get("JAVA_HOME")
    if home and shutil.which("java", path=f"{home}/bin"):
        java = f"{home}/bin/java"
    else:
        packages.require("java", f"openjdk-{OLDEST}-jre-headless")
        java = "java"
    found = version(java)
    if found < OLDEST:
        raise SystemExit(f"{java} is Java {found}, and Spark 4 needs {OLDEST}; set JAVA_HOME to a newer one")


def version(java: str) -> int:
    """Return the feature release of a java, as 17; 0 if it does not say."""
    done = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
    release = re.search(r'version "(?:1\.)?(\d+)', done.stderr)
    return int(release.group(1)) if release else 0
