"""The chunks engine."""
