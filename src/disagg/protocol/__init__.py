"""Pure tables: messages, pairing, the life of a sequence, both ends of a hand-off, the journal."""
