"""The ``statetree`` command: shows, compares and converts checkpoints (extra ``cli``)."""
