"""The formats of checkpoints: how each is read without trust, and written."""
