"""Amazon SQS: DelaySeconds up to 900 s, a delay FIFO beyond."""

from __future__ import annotations
