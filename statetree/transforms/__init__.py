"""The transforms, one file a verb: short declarations over the engines.

- over trees: ``select``, ``partition``, ``merge``, ``update``, ``rename``
- ``conversions/``: ``Conversion``
- over leaves: ``cast``, ``combine``
- over spans: ``allocate_like``, ``offload``
- over pairs of leaves: ``copy_into``, ``similarity``
- ``deltas/``: ``delta``, ``apply_delta``
- over exchange: ``gather``, ``distribute``, ``broadcast``, ``reshard``, ``partition_replicas``, ``digest``, ``audit``
"""
