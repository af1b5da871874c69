"""What is looked for in a wheel is missed when it is not there."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

import statetree
from tests.package.__main__ import EXTRAS, Failed, check_contents, done

PACKAGE = Path(statetree.__file__).parent
METADATA = "".join(f"Provides-Extra: {extra}\n" for extra in EXTRAS)


def wheel(folder, *, without="", more="", licence="licenses/LICENSE", metadata=METADATA):
    path = folder / "statetree.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in PACKAGE.rglob("*"):
            name = file.relative_to(PACKAGE.parent).as_posix()
            if file.is_file() and "__pycache__" not in file.parts and name != without:
                archive.writestr(name, "")
        archive.writestr("statetree-0.dist-info/METADATA", metadata)
        archive.writestr(f"statetree-0.dist-info/{licence}", "")
        if more:
            archive.writestr(more, "")
    return path


def test_a_whole_wheel_passes(tmp_path):
    check_contents(wheel(tmp_path), PACKAGE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"without": "statetree/py.typed"}, r"lacks \['statetree/py.typed'\]"),
        ({"without": "statetree/cli/app.py"}, r"lacks \['statetree/cli/app.py'\]"),
        ({"more": "tests/__init__.py"}, r"has \['tests/__init__.py'\] too much"),
        ({"licence": "NOTICE"}, "no licence"),
        ({"metadata": METADATA.replace("Provides-Extra: cli\n", "")}, r"extras \['cli'\]"),
    ],
)
def test_what_is_wrong_with_a_wheel_is_noticed(change, message, tmp_path):
    with pytest.raises(Failed, match=message):
        check_contents(wheel(tmp_path, **change), PACKAGE)


def test_a_command_that_ends_otherwise_is_noticed():
    assert done("echo", "said") == "said\n"
    with pytest.raises(Failed, match="ended with status 1: expected 2"):
        done("false", status=2)
