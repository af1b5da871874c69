"""Only who names this folder runs it: the packages that it needs are no part of the group ``test``."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    asked = any("integration" in argument for argument in config.args)
    return None if asked else True


def pytest_report_header() -> str:
    from importlib.metadata import version

    names = ("torch", "transformers", "peft", "torchao", "accelerate", "safetensors")
    return ", ".join(f"{name} {version(name)}" for name in names)
