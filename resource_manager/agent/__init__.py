"""What runs on a server: the probe of its GPUs, and the agent that sends what the probe finds."""
