"""Tests of ``statetree/spans``."""
