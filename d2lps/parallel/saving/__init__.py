"""Checkpoints of which every rank writes its own pieces, to be cut otherwise when they are read."""
