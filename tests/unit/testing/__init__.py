"""Tests of statetree.testing."""
