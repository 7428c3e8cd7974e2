"""What makes ``df.write.format("delayed")`` known: Spark looks for it in each top-level module named pyspark_*."""

from __future__ import annotations

from airflow_delayed.spark.sink import DelayedDataSource as DefaultSource

__all__ = ["DefaultSource"]
