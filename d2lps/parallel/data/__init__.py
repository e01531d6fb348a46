"""Copies of a model that share a batch: gradients averaged in buckets, beside the backward pass, in 16 bits, less often."""
