"""Recorded workloads played through the allocator: openb, Muri, histories, traces of one's own."""
