"""The tree engine."""
