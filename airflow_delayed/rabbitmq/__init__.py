"""RabbitMQ: topologies of delay levels."""

from __future__ import annotations
