"""An SQLAlchemy that is too old is named before an import fails for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_sqlalchemy_1_is_refused_in_plain_words(here: Path, tmp_path: Path):
    (tmp_path / "sqlalchemy.py").write_text('__version__ = "1.4.54"\n')
    done = subprocess.run(
        [sys.executable, "-c", "import airflow_delayed.store.alchemy"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(here)))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "ImportError: the SQL store needs SQLAlchemy 2.0 or later, and here is 1.4.54" in done.stderr
    assert "pip install 'sqlalchemy>=2,<2.1'" in done.stderr
