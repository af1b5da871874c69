"""The command ``statetree``, which looks into checkpoints, compares and converts them: ``statetree.files`` opens them.

- ``app``: the arguments; ``process``: streams, signals and the exit status; ``opening``: the format of a name.
- ``show``, ``rows``, ``table``: the command ``show``; ``describing``: leaves in words.
- ``diff``, ``differences``, ``elements``: the command ``diff``.
- ``convert``, ``selecting``, ``casting``: the command ``convert``; ``publishing``: a destination is whole or not there.
- ``digests``: SHA-256 sums beside a checkpoint; ``shared_bytes``: which entries share memory.
- ``dcp_directory``, ``dcp_nesting``, ``dcp_writer``: directories of ``torch.distributed.checkpoint``.
- ``progress``: a bar on terminals.
"""
