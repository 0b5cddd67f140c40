"""Moves opaque bytes between two arenas: in-process, shared memory and TCP. Knows nothing of tokens or layers."""
