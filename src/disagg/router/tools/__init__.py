"""Function calls: what may be called, how a model family spells it, and reading it from the text as it comes."""
