"""Decide on a replica, commit on a version, retry after a lost race."""
