"""Simulator package: replay."""
