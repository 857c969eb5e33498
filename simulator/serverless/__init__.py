"""Simulator package: serverless."""
