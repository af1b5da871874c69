"""``{command-help} show``: what ``statetree show --help`` prints, at the time of the build."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from statetree.cli.app import cli

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_WIDTH = 88


class CommandHelp(SphinxDirective):
    """Puts the help of a command where it stands."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Ask the command for its help."""
        name = self.arguments[0]
        command = cli.commands[name]
        context = click.Context(command, info_name=f"statetree {name}", terminal_width=_WIDTH)
        text = command.get_help(context)
        return [nodes.literal_block(text, text, language="text")]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
