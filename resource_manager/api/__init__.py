"""The HTTP face of the manager: one Flask blueprint, its console, and who may call what."""
