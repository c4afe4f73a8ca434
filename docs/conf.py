"""Configuration of Sphinx, which builds these pages: `make docs`."""

project = "SpeedyZero in JAX"
extensions = ["myst_parser"]
myst_heading_anchors = 3  # links to headings, as on GitHub
html_theme = "furo"
html_title = project
html_copy_source = False
html_show_copyright = False
html_use_index = False
