"""What people look at: widgets that live in Jupyter, in Colab, and in the built page without a kernel or a network."""

from d2lps.widgets.player import Player

__all__ = ["Player"]
