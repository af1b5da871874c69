"""The command ``statetree``, which looks into checkpoints, compares and converts them: ``statetree.files`` opens them.

- ``app``: the arguments; ``process``: streams, signals and the exit status.
- ``show``: the command ``show``; ``rows``: a checkpoint as rows and groups of rows; ``table``: lines of columns.
- ``convert``: the command ``convert``; ``rules_file``: its rules; ``entries``: the entries of any checkpoint, and their
  rows.
- ``steps``: what ``show`` says of a run's folder. ``prove_resume``, ``doctor``: the commands of these names.
- ``diff``: the command ``diff``, which stands on ``similarity``.
- ``progress``: how far a command has come, on a terminal.
"""
