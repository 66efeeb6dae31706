"""Configuration of the documentation site; CONTRIBUTING.md tells how to build it."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# For the module that writes the reference; the package is the checkout's own.
sys.path[:0] = [str(HERE.parent), str(HERE)]

from make_reference import write_reference  # noqa: E402

from edgeinfer.core.version import VERSION  # noqa: E402

project = "edgeinfer"
author = copyright = "The edgeinfer authors"
version = release = VERSION

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
nitpicky = False  # types of numpy and of private modules have no page here

# Links between pages name headings, as they do in a viewer of Markdown files.
myst_enable_extensions = ["attrs_block"]
myst_heading_anchors = 4
# The lab notebook and the results are written as they came.
suppress_warnings = ["myst.header"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
autodoc_default_options = {"members": True, "show-inheritance": False}
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"edgeinfer {VERSION}"
html_show_sphinx = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["tables.css"]
# Nothing is loaded from a network: the theme brings its own files and uses the fonts of the system.
html_theme_options = {"navigation_with_keys": True}

# Before Sphinx looks for pages.
write_reference(HERE / "reference")
