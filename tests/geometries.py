"""The lists of tensors that statetree recognises."""

from statetree.spans import geometry_cache


def forget_geometries() -> None:
    """Have none recognised: for tests that must see both ways."""
    geometry_cache._remembered = ()
    geometry_cache._glimpsed.clear()
