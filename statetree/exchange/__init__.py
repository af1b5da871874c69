"""The exchange engine."""
