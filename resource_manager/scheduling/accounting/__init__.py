"""Accounting: the lives of leases in a history, and their GPU-hours."""
