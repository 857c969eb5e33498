"""Simulator package: oasis."""
