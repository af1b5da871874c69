"""The command ``statetree``, which looks into checkpoints, compares and converts them: ``statetree.files`` opens them.

- ``app``: the arguments; ``process``: streams, signals and the exit status.
- ``entries``: a checkpoint as rows; ``describing``: leaves in words; ``table``: lines of columns.
- ``show``: the command ``show``; ``statistics``: what it says of elements.
- ``diff``: the command ``diff``; ``elements``: what it says of them.
- ``convert``: the command ``convert``; ``rewriting``: keys and dtypes.
"""
