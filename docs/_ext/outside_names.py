"""Links names of Python and torch in signatures and ``Raises:`` to the documentation of these projects.

In place of intersphinx, which needs the network at every build, or copies of two large inventories: the signatures have
some forty such names. A name that is not in the table stays plain text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from docutils import nodes

if TYPE_CHECKING:
    from sphinx.addnodes import pending_xref
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

_PYTHON: Final = "https://docs.python.org/3/library/"
_TORCH: Final = "https://docs.pytorch.org/docs/stable/"

#: Pages, with what comes before a name in an anchor, and the names.
_PAGES: Final = (
    (_PYTHON + "functions.html#", "bool float int object slice type"),
    (_PYTHON + "stdtypes.html#", "bytes dict list str tuple"),
    (_PYTHON + "constants.html#", "None"),
    (
        _PYTHON + "exceptions.html#",
        "AssertionError BaseException Exception MemoryError OSError RecursionError RuntimeError TypeError ValueError",
    ),
    (_PYTHON + "typing.html#typing.", "Any Literal"),
    (
        _PYTHON + "collections.abc.html#collections.abc.",
        "Callable Collection Iterable Iterator Mapping Sequence",
    ),
    (_PYTHON + "concurrent.futures.html#concurrent.futures.", "Future"),
    (_PYTHON + "os.html#os.", "PathLike"),
    (_TORCH + "tensors.html#torch.", "Tensor"),
    (_TORCH + "distributed.checkpoint.html#torch.distributed.checkpoint.", "StorageReader StorageWriter"),
)
#: Where the name is no anchor: the section about it.
_SECTIONS: Final = {
    "torch.dtype": _TORCH + "tensor_attributes.html#torch-dtype",
    "torch.device": _TORCH + "tensor_attributes.html#torch-device",
    "ProcessGroup": _TORCH + "distributed.html#groups",
}
_ADDRESSES: Final = {name: start + name for start, names in _PAGES for name in names.split()} | _SECTIONS
#: Modules from which such names are written in full.
_MODULES: Final = ("collections.abc.", "concurrent.futures.", "os.", "torch.", "typing.")


def address_of(name: str) -> str | None:
    """Return where a name is documented, or ``None`` if it is not in the table."""
    module = next((module for module in _MODULES if name.startswith(module)), "")
    return _ADDRESSES.get(name) or _ADDRESSES.get(name.removeprefix(module))


def link(
    _app: Sphinx, _env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.reference | None:
    """Make a link of a reference that Sphinx cannot resolve."""
    address = address_of(node["reftarget"]) if node.get("refdomain") == "py" else None
    return address and nodes.reference("", "", content, internal=False, refuri=address)


def setup(app: Sphinx) -> dict[str, Any]:
    """Have it called for what is not in these pages."""
    app.connect("missing-reference", link)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
