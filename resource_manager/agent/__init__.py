"""GPUs of the servers as they really are: probe, report, health."""
