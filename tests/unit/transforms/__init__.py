"""The transforms, one file a verb."""
