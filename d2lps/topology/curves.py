"""The lines of a drawing: parabolas, side by side, with arrowheads."""

import math

Point = tuple[float, float]


def curve(start: Point, end: Point, bend: float, shift: float) -> list[Point]:
    """Start, control point and end of a parabola that leaves the straight line by `bend` upwards, `shift`ed to its left."""
    (x0, y0), (x1, y1) = start, end
    length = math.hypot(x1 - x0, y1 - y0) or 1.0
    left = -(y1 - y0) / length * shift, (x1 - x0) / length * shift
    middle = (x0 + x1) / 2, (y0 + y1) / 2 + 2 * bend
    return [(x + left[0], y + left[1]) for x, y in (start, middle, end)]


def arrowhead(line: list[Point], size: float) -> list[Point]:
    """A triangle a little behind the middle of a curve."""
    (x0, y0), (x1, y1), (x2, y2) = line
    t = 0.6
    x = (1 - t) ** 2 * x0 + 2 * t * (1 - t) * x1 + t**2 * x2
    y = (1 - t) ** 2 * y0 + 2 * t * (1 - t) * y1 + t**2 * y2
    dx, dy = (1 - t) * (x1 - x0) + t * (x2 - x1), (1 - t) * (y1 - y0) + t * (y2 - y1)
    length = math.hypot(dx, dy) or 1.0
    dx, dy = size * dx / length, size * dy / length
    return [(x + dx, y + dy), (x - dx - 0.6 * dy, y - dy + 0.6 * dx), (x - dx + 0.6 * dy, y - dy - 0.6 * dx)]
