"""Limits of time: multiples of what a process takes to start here and now."""

from statetree.testing.pace import units

__all__ = ["units"]
