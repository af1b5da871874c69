"""Tests of ``statetree/leaves/types``."""
