"""Triggers of tasks with GPUs: one that carries a task from its wait to its result, and further waits."""
