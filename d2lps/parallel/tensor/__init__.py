"""Ranks that share each layer: a matrix by columns or rows, and the two functions that bring the parts together."""
