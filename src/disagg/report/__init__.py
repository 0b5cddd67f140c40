"""Values into pages: plots as inline SVG, one self-contained HTML file, light and dark. Pure."""
