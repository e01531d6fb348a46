"""How the book's figures look: one palette for plots, players and pages, and sizes that can be read on a phone.

>>> style()
>>> import matplotlib
>>> matplotlib.rcParams["figure.figsize"]
[5.4, 3.2]
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.colors import Colormap

# Okabe and Ito's colors, which the color-blind can tell apart: those of ranks 0 to 7 in a player, too.
BLUE, ORANGE, GREEN, PINK = "#0072b2", "#e69f00", "#009e73", "#cc79a7"
SKY, RED, YELLOW, GREY = "#56b4e9", "#d55e00", "#e8d92b", "#7d848c"
COLORS = [BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, GREY]


def shades(color: str) -> "Colormap":
    """A scale for amounts: mixtures of white and a color of ours, from an eighth of it to all.

    The dark page mixes each with its own ground instead of white, so more stays more to see there. With a scale of many
    colors it would not.

    >>> [round(float(part), 2) for part in shades(RED)(1.0)[:3]]
    [0.84, 0.37, 0.0]
    """
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    full = to_rgb(color)
    red, green, blue = (1 - (1 - part) / 8 for part in full)
    return LinearSegmentedColormap.from_list(f"shades of {color}", [(red, green, blue), full])


def style() -> None:
    """Give matplotlib the book's look, for all figures that follow.

    A figure is 5.4 inches wide and its text 9 points or more, so that it is read in a page's column and on a phone alike;
    panels stand below each other rather than side by side. Colors come in the order of `COLORS`.
    """
    import matplotlib.pyplot as plt  # only where something is drawn: it takes half a second

    plt.rcParams.update({
        "axes.prop_cycle": plt.cycler(color=COLORS), "axes.spines.right": False, "axes.spines.top": False,
        "axes.titlelocation": "left", "axes.titlesize": 11, "axes.labelsize": 10, "xtick.labelsize": 9, "ytick.labelsize": 9,
        "figure.constrained_layout.use": True, "figure.dpi": 160, "figure.facecolor": "white", "figure.figsize": (5.4, 3.2),
        "font.size": 10, "legend.fontsize": 9, "legend.frameon": False, "savefig.facecolor": "white",
    })  # fmt: skip
