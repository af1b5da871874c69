"""Conversions: how two forms of a state belong together, in names and axes, both ways.

From the top to the bottom:

- ``rule_set``: ``Conversion``, its rules applied to all names of a tree.
- ``converted_leaves``: leaves made of blocks of others: views, copies, and what is read later.
- ``rule``: one rule: its names, its pattern, and what becomes of one set of leaves.
"""
