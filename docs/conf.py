"""Sphinx configuration. The reference pages of the command line and the API are written from the code at every build."""

import sys
import tomllib
from functools import cached_property
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from tools.docs.reference import write_reference  # noqa: E402

project = "ooc"
author = "the ooc authors"
copyright = "the ooc authors, Apache-2.0"
version = release = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]["version"]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build", "jupyter_execute", "ports"]  # myst_nb leaves notebooks beside the build
nb_execution_mode = "off"  # the tests run the notebooks

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

default_role = "literal"  # docstrings write code in single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"ooc {release}"
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True


def skip(app: Any, what: str, name: str, value: Any, skipped: bool, options: Any) -> bool | None:
    """Leave attributes of classes out that are neither methods nor properties: constants that subclasses set; and what is
    Lightning's, whose docstrings refer to its own pages."""
    if str(getattr(value, "__module__", "")).startswith(("lightning.", "lightning_fabric.")):
        return True
    return None if callable(value) or isinstance(value, property | cached_property) or what != "class" else True


def setup(app: Any) -> None:
    """Write the reference pages before Sphinx looks for sources."""
    write_reference(HERE / "reference")
    app.connect("autodoc-skip-member", skip)
