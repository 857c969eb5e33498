"""Whose turn it is: orders, teams, backfill, windows and prices."""
