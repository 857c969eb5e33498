"""Replay of recorded workloads through the allocator: openb, Muri, histories, and a user's own traces."""
