"""Metrics, logs, traces and trends of the service."""
