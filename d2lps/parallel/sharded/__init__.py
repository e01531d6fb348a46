"""Copies of a model that share what only one of them needs at a time: ZeRO, and clipping by the norm of all pieces."""
