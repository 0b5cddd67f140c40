"""Values in, one self-contained page out: plots as SVG, tables, light and dark."""
