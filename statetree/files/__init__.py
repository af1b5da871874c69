"""Checkpoint files as trees: what a file holds is known from its headers, elements are read when they are asked for.

Files are not trusted: nothing in them is executed, sizes are compared with the file before memory is taken.

- ``checkpoint``: a checkpoint that was opened, its entries, and what they are.
- ``stored``: what stands for tensors in its tree: views on storages whose bytes lie in a file.
- ``ranges``: ranges of bytes of files, every read of which is checked; ``untrusted``: names and texts out of files.
- ``safetensors_reader``, ``safetensors_writer``: one file, or several with an index.
- ``torch_reader``, ``torch_legacy``, ``torch_objects``, ``torch_writer``, ``zip_archive``: what ``torch.save`` writes.
- ``safe_pickle``: pickles read without running or importing anything.
- ``torch_names``: torch's classes and functions that its files name.
"""
