"""Tests of ``statetree/tree``."""
