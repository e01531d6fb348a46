"""Plots for a dark page.

They are drawn on white. Here each pixel is taken apart into white and one color of the palette, and put together again from
the dark page's ground and the same color as a player has it in the dark. So orange stays orange, white becomes the page, black
becomes light, and edges stay smooth. What is no mixture of white and one of our colors, such as a scale of many colors, has
its lightness turned round and its hue kept.
"""

import io
import re
from pathlib import Path

import numpy as np
from PIL import Image

from d2lps.figures import COLORS

# As --rank-0 ... --rank-7 of player.css in the dark, then black; the ground and the ink of d2lps.css.
DARK = ["#2b8fd0", "#e69f00", "#12ab80", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#969da6"]
GROUND, INK = "#16191d", "#e8eaed"
NEAR, FAR = 0.04, 0.12  # distances from a mixture: up to the first it counts as one, from the second on it does not
PICTURE = re.compile(r"<noscript>.*?</noscript>|<img [^>]*?>", re.DOTALL)
SOURCE = re.compile(r'src="((?:\.\./)*_images/[^"]*)\.png"')

# CSS's hue-rotate(180deg), which leaves greys as they are.
OPPOSITE = np.array([[-0.574, 1.43, 0.144], [0.426, 0.43, 0.144], [0.426, 1.43, -0.856]])


def values(color: str) -> np.ndarray:
    """Red, green and blue from 0 to 1.

    >>> values("#ff0033").tolist()
    [1.0, 0.0, 0.2]
    """
    return np.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])


def turned(colors: np.ndarray) -> np.ndarray:
    """Colors, one a row, as they are on the dark page."""
    ground, below = values(GROUND), 1 - colors  # white is 0
    light = 1 - np.array([values(color) for color in [*COLORS, "#000000"]])
    dark = np.array([values(color) for color in [*DARK, INK]])
    shares = np.clip(below @ light.T / (light**2).sum(axis=1), 0, 1)  # how much of each color there might be
    misses = np.linalg.norm(below[:, None] - shares[..., None] * light, axis=2)
    nearest, rows = misses.argmin(axis=1), np.arange(len(colors))
    share, miss = shares[rows, nearest, None], misses[rows, nearest, None]
    mixed = (1 - share) * ground + share * dark[nearest]
    other = ground + np.clip(below @ OPPOSITE.T, 0, 1) * (values(INK) - ground)
    return mixed + np.clip((miss - NEAR) / (FAR - NEAR), 0, 1) * (other - mixed)


def dark_picture(png: bytes) -> bytes:
    """A plot drawn on white, for the dark page."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    pixels = np.asarray(image, dtype=np.uint32)
    numbers = (pixels[..., 0] << 16) | (pixels[..., 1] << 8) | pixels[..., 2]
    found, places = np.unique(numbers, return_inverse=True)
    colors = turned(np.stack([found >> 16, found >> 8 & 255, found & 255], axis=1) / 255)
    out = io.BytesIO()
    drawn = Image.fromarray((colors * 255).round().astype(np.uint8)[places.reshape(numbers.shape)])
    drawn.quantize(128).save(out, format="png")
    return out.getvalue()


def both(page: str, path: Path) -> str:
    """The page at `path` with each plot twice, one for each of the theme's modes; only what is seen is loaded."""

    def twice(match: re.Match[str]) -> str:
        tag, source = match[0], SOURCE.search(match[0])
        if source is None or tag.startswith("<noscript>"):
            return tag
        light = (path.parent / f"{source[1]}.png").resolve()
        dark = light.with_name(f"{light.stem}-dark.png")
        if not dark.exists() or dark.stat().st_mtime < light.stat().st_mtime:
            dark.write_bytes(dark_picture(light.read_bytes()))
        width, height = Image.open(light).size  # room is kept for what is loaded late
        lazy = tag.replace("<img ", f'<img loading="lazy" width="{width}" height="{height}" ', 1)
        return "".join(shown(lazy, mode).replace(source[1], source[1] + end) for mode, end in (("light", ""), ("dark", "-dark")))

    return PICTURE.sub(twice, page)


def shown(tag: str, mode: str) -> str:
    """The tag of a picture that only one mode shows.

    >>> shown('<img class="a" src="b.png">', "dark")
    '<img class="d2lps-dark a" src="b.png">'
    """
    if 'class="' in tag:
        return tag.replace('class="', f'class="d2lps-{mode} ', 1)
    return tag.replace("<img ", f'<img class="d2lps-{mode}" ', 1)
