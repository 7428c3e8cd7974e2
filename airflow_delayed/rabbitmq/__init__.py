"""RabbitMQ: a topology of 28 delay levels."""

from __future__ import annotations
