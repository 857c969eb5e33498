"""Commits of many threads: decide a group of operations on a replica, write once, answer each caller."""
