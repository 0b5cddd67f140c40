"""HTTP in, text to tokens, placement, streams out."""
