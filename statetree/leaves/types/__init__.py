"""The leaf types that come with statetree, each loaded when a value of its kind is first met."""
