"""statetree measured against its peers and against the floor, in one process: ``python -m benchmarks``."""
