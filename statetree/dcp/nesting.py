"""How the flat entries of DCP's own checkpoints were nested: its planner leaves a path for each key in the metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statetree.files.safe_pickle import BadPickle, Reader, Record, Recorded, StoredObject

if TYPE_CHECKING:
    from collections.abc import Mapping


def read_paths(data: bytes) -> dict[str, tuple[str | int, ...]]:
    """Return the path of each key, as far as metadata has them. Nothing in its pickle is executed.

    Args:
        data: A pickle of metadata, which ``read_metadata`` found to be one.
    """

    def refer(_module: str, name: str) -> Any:
        return Recorded(name) if name == "Metadata" else StoredObject(name)

    def refuse(name: str, _args: tuple[Any, ...]) -> Any:
        raise BadPickle(f"it calls {name}")

    record = Reader(data, refuse, refer, is_modern=True).load()
    paths = record.state.get("planner_data") if isinstance(record, Record) and type(record.state) is dict else None
    if type(paths) is not dict:
        return {}
    return {key: path for key, path in paths.items() if type(key) is str and _is_path(path)}


def _is_path(path: Any) -> bool:
    return type(path) is tuple and bool(path) and all(type(step) in (str, int) for step in path)


def nested(values: Mapping[str, Any], paths: Mapping[str, tuple[str | int, ...]]) -> dict[str, Any] | None:
    """Return values in dicts and lists, as their paths have it; ``None`` if the paths contradict each other.

    Below a number there is a list; what has no path stays at the top under its key.
    """
    root: dict[Any, Any] = {}
    containers = [root]
    inner = {id(root)}
    for key, value in values.items():
        *above, last = paths.get(key, (key,))
        place = root
        for step in above:
            if step not in place:
                place[step] = {}
                containers.append(place[step])
                inner.add(id(place[step]))
            elif id(place[step]) not in inner:
                return None
            place = place[step]
        if last in place:
            return None
        place[last] = value
    lists: dict[int, list[Any]] = {}
    for container in reversed(containers):  # what is within comes before what it is in
        for step, child in container.items():
            container[step] = lists.get(id(child), child)
        if any(type(step) is int for step in container):
            if container is root or set(container) != set(range(len(container))):
                return None
            lists[id(container)] = [container[index] for index in range(len(container))]
    return root
