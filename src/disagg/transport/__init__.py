"""Moves opaque bytes between two arenas: in-process and TCP. Knows nothing of tokens or layers."""
