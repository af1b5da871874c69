"""Sphinx configuration. Build with ``make docs``: warnings are errors."""

import sys
from pathlib import Path

from statetree import __version__

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "statetree"
author = "statetree contributors"
copyright = author
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "benchmark_results",
    "command_help",
    "outside_names",
    "prose_returns",
]
exclude_patterns = ["_ext", "pictures/*.py", "notebooks"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # or attributes of named tuples would be described twice
napoleon_custom_sections = ["Aliasing", "Collective"]
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"statetree {release}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
copybutton_prompt_text = r">>> |\.\.\. |\$ "  # of what is typed: neither prompts nor output are copied
copybutton_prompt_is_regexp = True
pygments_style = "a11y-high-contrast-light"  # of furo's accessible-pygments
pygments_dark_style = "a11y-high-contrast-dark"
