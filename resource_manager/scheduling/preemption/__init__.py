"""Leases that end for requests with a stronger right."""
