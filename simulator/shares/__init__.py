"""Shares of a fleet of several GPU types: how much of each type every job and team should get."""
