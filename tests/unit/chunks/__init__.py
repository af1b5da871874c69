"""Tests of ``statetree/chunks``."""
