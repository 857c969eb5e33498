"""Simulator package: edge."""
