"""Tests of ``statetree/leaves``."""
