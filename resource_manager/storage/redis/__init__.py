"""The state in Redis."""
