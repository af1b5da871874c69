"""Checkpoints that others published, taken through every transform and back."""
