"""Sphinx's configuration; `make docs` builds the site."""

from selective_scan import __version__

project = "selective_scan"
author = "the selective_scan contributors"
release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"{project} {release}"
html_show_copyright = False

myst_heading_anchors = 3
autodoc_typehints = "none"  # the docstrings say types, with shapes and dtypes
napoleon_numpy_docstring = False

# Every cross-reference must resolve, but for those to packages whose documentation is elsewhere.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(torch|collections)\..*")]
