"""Whoever looks up a public name finds it: in an API page, and with a docstring."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

API = Path(__file__).parents[2] / "docs" / "api"
MODULES = ("statetree", "statetree.dcp", "statetree.testing")
_ENTRY = re.compile(r"^\.\. (auto\w+|py:\w+):: (\S+)", re.MULTILINE)


def entries() -> list[str]:
    """Return what the API pages document, in their order."""
    return [name for page in sorted(API.glob("*.md")) for _, name in _ENTRY.findall(page.read_text(encoding="utf-8"))]


def public_names() -> list[str]:
    return [f"{module}.{name}" for module in MODULES for name in importlib.import_module(module).__all__]


def resolve(name: str) -> object:
    """Return what a dotted name stands for."""
    module, rest = name, []
    while True:
        try:
            found = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            rest.insert(0, last)
    for part in rest:
        found = getattr(found, part)
    return found


def undocumented(value: object) -> list[str]:
    """Return what of a class or function has no docstring of its own: itself, or public methods and properties."""
    own = vars(value).get("__doc__") if inspect.isclass(value) else getattr(value, "__doc__", None)
    found = [] if own and own.strip() else ["<itself>"]
    if inspect.isclass(value):
        for name, member in vars(value).items():
            is_code = inspect.isroutine(member) or isinstance(member, property)
            if not name.startswith("_") and is_code and not inspect.getdoc(getattr(value, name)):
                found.append(name)
    return found


@pytest.mark.parametrize("name", public_names())
def test_each_public_name_has_a_docstring(name):
    assert undocumented(resolve(name)) == []


@pytest.mark.parametrize("name", public_names())
def test_each_public_name_has_an_entry(name):
    assert entries().count(name) == 1


@pytest.mark.parametrize("name", entries())
def test_each_entry_exists(name):
    assert resolve(name) is not None


def test_what_lacks_a_docstring_is_noticed():
    class Documented:
        """It is."""

        def said(self):
            """Say it."""

        def unsaid(self):
            pass

        @property
        def owned(self):
            return 1

    class Silent(Documented):
        pass

    assert undocumented(Documented) == ["unsaid", "owned"]
    assert undocumented(Silent) == ["<itself>"]
    assert undocumented(lambda: None) == ["<itself>"]
