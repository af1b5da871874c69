"""One file a module of ``statetree.leaf_types``, under the same name."""
