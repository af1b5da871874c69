"""Handles of files."""

from statetree.files.ranges import OpenFiles


def test_one_whose_making_was_interrupted_is_dropped_in_silence():
    files = OpenFiles.__new__(OpenFiles)  # an unraisable exception is a warning, and warnings are errors
    del files
