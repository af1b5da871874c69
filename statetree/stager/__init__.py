"""The stager engine."""
