"""The command ``statetree``, which looks into checkpoints, compares and converts them: ``statetree.files`` opens them.

- ``app``: the arguments; ``process``: streams, signals and the exit status.
- ``show``: the command ``show``; ``rows``: a checkpoint as rows and groups of rows; ``table``: lines of columns;
  ``statistics``: what ``--stats`` says of elements.
- ``steps``: ``show`` of a run's folder; ``prove_resume``, ``doctor``: the commands of these names.
- ``convert``: the command ``convert``; ``entries``: the entries of any checkpoint, and their rows.
- ``diff``: the command ``diff``; ``stored_comparison``: the elements of two files.
"""
