"""Bytes: records as frames, the log, checkpoints, and tensors that lie on the disk."""
