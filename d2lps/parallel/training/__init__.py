"""A plan of all these together, and the training run that carries it out."""
