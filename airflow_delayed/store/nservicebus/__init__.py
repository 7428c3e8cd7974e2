"""Taking over messages that another store keeps, such as NServiceBus's."""
