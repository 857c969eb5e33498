"""Simulator package: vgpu."""
