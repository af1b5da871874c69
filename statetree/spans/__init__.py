"""The spans engine."""
