"""The leaves engine."""
