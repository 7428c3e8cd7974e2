"""Sources of rows as objects, for ``DelayedSendOperator(source=...)``: files and a query.

A source only says where the rows are. Its fields are templates of the operator's, and may be what another task
returns; an operator works on a copy. The task opens it.
"""

from __future__ import annotations

from airflow_delayed.sources.query import SqlSource
from airflow_delayed.sources.templated import JsonLinesSource, ParquetSource

__all__ = ["JsonLinesSource", "ParquetSource", "SqlSource"]
