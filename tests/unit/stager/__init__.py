"""Tests of ``statetree/stager``."""
