"""Round-based replay: between rounds jobs are preempted, resized and placed again, as in studies."""
