"""Tests of ``statetree/exchange``."""
