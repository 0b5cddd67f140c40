"""Who owns which block, and where a span lies in an arena. Integers only: no torch, no bytes moved."""
