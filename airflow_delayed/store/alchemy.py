"""Imported first by what uses the store: it says why SQLAlchemy 1.4 is too old, before an import fails for it."""

from __future__ import annotations

import sqlalchemy

if sqlalchemy.__version__.startswith("1."):
    raise ImportError(
        f"the SQL store needs SQLAlchemy 2.0 or later, and here is {sqlalchemy.__version__}, as Airflow 3.1's"
        " constraints have it: pip install 'sqlalchemy>=2,<2.1', or send without a store"
    )
