"""Models on disk: where they are, what they say of themselves. No torch."""
