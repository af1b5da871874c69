"""The package as its users get it: built, installed into an empty environment, and tested from there."""
