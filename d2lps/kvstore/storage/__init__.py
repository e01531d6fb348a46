"""Bytes: records as frames, the log that begins with a state, and tensors that lie on the disk."""
