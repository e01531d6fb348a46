"""A topology as a picture: shapes say what a node is, a link's width its bandwidth, its colour what you like."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import matplotlib.pyplot as plt
import networkx as nx
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch, Patch, PathPatch, Polygon, RegularPolygon
from matplotlib.path import Path
from matplotlib.ticker import EngFormatter

from d2lps.topology.layout import Node, Point, layout

MOST = 80  # nodes; more cannot be told apart
FILL = {"device": "#cfe3f3", "host": "#fbe3b5", "switch": "#dddddd"}
EDGE = {"device": "#0072b2", "host": "#b97a00", "switch": "#555555"}
LINK, BOX, WIDEST = "#8a8a8a", "#f4f4f4", 5.0
COLORS = ListedColormap(plt.get_cmap("YlOrRd")([0.12 + 0.88 * step / 255 for step in range(256)]))  # paler is invisible on white


def draw(
    graph: nx.DiGraph,
    title: str,
    ax: Axes | None = None,
    *,
    links: Mapping[tuple[Node, Node], float] | None = None,
    label: str = "",
    hide: Collection[Node] = (),
    names: bool = True,
    legend: bool = True,
) -> Axes:
    """Devices are squares, hosts hexagons, switches rounded bars; a link's width grows with the root of its bandwidth.

    links: {(src, dst): value}, bytes or utilization for example, colours each direction of the links, `label` says of what;
    those whose value is 0, or that have none, stay grey. hide: nodes to leave out: `dgx1.draw(hide=dgx1.hosts + dgx1.switches)`.

    >>> trace = simulate(all_reduce_once, cluster).trace                            # doctest: +SKIP
    >>> cluster.draw(links=trace.utilization(), label="utilization")                # doctest: +SKIP
    """
    shown = graph.copy()
    shown.remove_nodes_from(list(hide))
    if len(shown) > MOST:
        raise ValueError(f"{title} has {len(shown)} nodes, and a picture has room for {MOST}: draw a smaller one of its kind")
    if not shown:
        raise ValueError(f"nothing of {title} is left to draw")
    for link in links or ():
        if link not in graph.edges:
            raise ValueError(f"links has a value for {link!r}, which is no link of {title}")
    picture = _Picture(graph, shown, title, ax)
    picture.boxes()
    if links is None:
        picture.links()
    else:
        picture.lanes(links, label)
    picture.nodes(names)
    if legend:
        picture.legend()
    return picture.ax


class _Picture:
    def __init__(self, whole: nx.DiGraph, shown: nx.DiGraph, title: str, ax: Axes | None) -> None:
        self.graph, self.layout = shown, layout(whole)
        self.kind: dict[Node, str] = dict(shown.nodes(data="kind"))
        self.fastest = max((bandwidth for *_, bandwidth in whole.edges(data="bandwidth")), default=1.0)
        # From the unit square to a plane in which both axes have the same scale.
        self.at = {node: (x, y * self.layout.aspect) for node, (x, y) in self.layout.positions.items() if node in shown}
        self.size = self._size(set(self.kind.values()), 1.0)
        self.sizes = {kind: self._size({kind}, 1.5 * self.size) for kind in FILL}
        self.gap = 0.36 * self.size  # between the lanes of one link
        if ax is None:
            width = min(max(5.0, 0.36 / self.size), 11.0)
            _, ax = plt.subplots(figsize=(width, width * self.layout.aspect + 0.9), layout="constrained")
        self.ax = ax
        self._frame(title)

    def _size(self, kinds: set[str], most: float) -> float:
        """Half the width of the nodes of some kinds: all are alike, none touch, and none are much larger than the others."""
        points = list(self.at.values())
        mine = [point for node, point in self.at.items() if self.kind[node] in kinds and node not in self.layout.bars]
        nearest = min((math.dist(a, b) for a in mine for b in points if a != b), default=1.0)
        return min(0.04, 0.36 * nearest, most)

    def _frame(self, title: str) -> None:
        xs = [x + side * self._half(node) for node, (x, _) in self.at.items() for side in (-1, 1)]
        ys = [y for _, y in self.at.values()]
        ys += [
            (self.at[u][1] + self.at[v][1]) / 2 + bend for (u, v), bend in self.layout.bends.items() if {u, v} <= self.at.keys()
        ]
        margin = 1.5 * max(self.sizes[kind] for kind in self.kind.values())
        self.ax.set(xlim=(min(xs) - margin, max(xs) + margin), ylim=(min(ys) - margin, max(ys) + margin), aspect="equal")
        self.ax.axis("off")
        self.ax.set_title(title, fontsize="medium")

    def _half(self, node: Node) -> float:
        """Half a node's width."""
        kind = self.kind[node]
        return self.layout.bars.get(node, 2 * self.sizes[kind] * (1.3 if kind == "switch" else 1.0)) / 2

    def _points(self, length: float) -> float:
        """A length of the plane, in points of the page."""
        box, figure = self.ax.get_position(), self.ax.figure.bbox
        (left, right), (low, high) = self.ax.get_xlim(), self.ax.get_ylim()
        pixels = min(box.width * figure.width / (right - left), box.height * figure.height / (high - low))
        return float(72 * length * pixels / self.ax.figure.dpi)

    # ---- nodes ----------------------------------------------------------------------------------------------------

    def nodes(self, names: bool) -> None:
        for node, (x, y) in self.at.items():
            self.ax.add_patch(self._shape(node, x, y))
            if names:
                text, font = self._name(node)
                self.ax.text(x, y, text, ha="center", va="center", fontsize=font, zorder=4)

    def _name(self, node: Node) -> tuple[str, float]:
        """What is written on a node, and how large: where "gpu12" would be too small, "12" says enough."""
        if node in self.layout.bars:
            return _last(node), 9.0
        room = self._points(2 * self._half(node))
        longest = max(len(_last(other)) for other in self.at if self.kind[other] == self.kind[node])
        font = min(9.0, 1.5 * room / longest, 0.6 * room)
        if font >= 5.5:
            return _last(node), font
        return re.sub(r"^\D+(?=\d)", "", _last(node)), min(9.0, 0.5 * room)

    def _shape(self, node: Node, x: float, y: float) -> Patch:
        kind, half = self.kind[node], self._half(node)
        size = max(self.size, 0.02) if node in self.layout.bars else self.sizes[kind]
        style: dict[str, Any] = {"facecolor": FILL[kind], "edgecolor": EDGE[kind], "linewidth": 1.2, "zorder": 3}
        if kind == "host":
            return RegularPolygon((x, y), 6, radius=1.2 * size, **style)
        high, corner = (0.75 * size, 0.75 * size) if kind == "switch" else (size, 0.2 * size)
        return _rounded(x - half, x + half, y - high, y + high, corner, **style)

    def boxes(self) -> None:
        """A shade behind what stands together, with its name below."""
        pad = 0.5 * self.size
        for name, nodes in self.layout.boxes.items():
            inside = [(*self.at[node], self._half(node)) for node in nodes if node in self.at]
            if not inside:
                continue
            left, right = min(x - half for x, _, half in inside) - pad, max(x + half for x, _, half in inside) + pad
            low, high = min(y for _, y, _ in inside) - 3 * pad, max(y for _, y, _ in inside) + 3 * pad
            self.ax.add_patch(_rounded(left, right, low, high, pad, facecolor=BOX, edgecolor="#cccccc", linewidth=0.6, zorder=0))
            below: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "top", "fontsize": 8}
            self.ax.annotate(name, ((left + right) / 2, low), (0, -3), **below)

    # ---- links ----------------------------------------------------------------------------------------------------

    def links(self) -> None:
        """One line for both directions if they are alike; a doubled link as two lines."""
        drawn = set()
        for src, dst, data in self.graph.edges(data=True):
            if self.graph.get_edge_data(dst, src, default={}).get("bandwidth") != data["bandwidth"]:
                self._line(src, dst, self._width(data["bandwidth"]), LINK, -self.gap / 2, head=True)
            elif (dst, src) not in drawn:
                drawn.add((src, dst))
                count = int(data.get("nvlinks", 1))
                for lane in range(count):
                    self._line(src, dst, self._width(data["bandwidth"] / count), LINK, (lane - (count - 1) / 2) * self.gap)

    def lanes(self, values: Mapping[tuple[Node, Node], float], label: str) -> None:
        """Each direction on its own, coloured by its value, on the right-hand side."""
        norm = Normalize(0.0, max(values.values(), default=1.0) or 1.0)
        edges = self.graph.edges(data="bandwidth")
        for src, dst, bandwidth in sorted(edges, key=lambda edge: values.get(edge[:2], -1.0)):
            if value := values.get((src, dst)):
                self._line(src, dst, self._width(bandwidth), COLORS(norm(value)), -self.gap / 2, head=True)
            else:
                self._line(src, dst, 0.5, LINK, -self.gap / 2)
        bar = self.ax.figure.colorbar(ScalarMappable(norm, COLORS), ax=self.ax, shrink=0.7, pad=0.02)
        bar.set_label(label)
        bar.outline.set_visible(False)
        if norm.vmax and norm.vmax >= 1000:
            bar.formatter = EngFormatter()
            bar.update_ticks()

    def _width(self, bandwidth: float) -> float:
        return max(0.5, min(WIDEST, self._points(0.22 * self.size)) * math.sqrt(bandwidth / self.fastest))

    def _line(self, src: Node, dst: Node, width: float, color: Any, shift: float, head: bool = False) -> None:
        """A parabola, `shift`ed to the left of its way, with an arrowhead where the direction matters."""
        bend = self.layout.bends.get((src, dst), self.layout.bends.get((dst, src), 0.0))
        (x0, y0), (x1, y1) = self._end(src, dst), self._end(dst, src)
        length = math.hypot(x1 - x0, y1 - y0) or 1.0
        left, up = -(y1 - y0) / length * shift, (x1 - x0) / length * shift
        straight = (x0, y0), ((x0 + x1) / 2, (y0 + y1) / 2 + 2 * bend), (x1, y1)
        line = [(x + left, y + up) for x, y in straight]
        path = Path(line, [Path.MOVETO, Path.CURVE3, Path.CURVE3])
        self.ax.add_patch(PathPatch(path, fill=False, edgecolor=color, linewidth=width, zorder=1))
        if head:
            self.ax.add_patch(Polygon(_arrowhead(line, 0.3 * self.size), facecolor=color, edgecolor="none", zorder=2))

    def _end(self, node: Node, other: Node) -> Point:
        """Where a link meets a node: a wide switch straight above or below the other end."""
        x, y = self.at[node]
        if node in self.layout.bars:
            half = self._half(node) - self.size
            x = min(max(self.at[other][0], x - half), x + half)
        return x, y

    # ---- legend ---------------------------------------------------------------------------------------------------

    def legend(self) -> None:
        """The shapes that there are, and the widths of up to five bandwidths."""
        pill = _rounded(-1.0, 1.0, -0.45, 0.45, 0.45).get_path()
        markers: dict[str, Any] = {"device": ("s", 9), "host": ("h", 9), "switch": (pill, 13)}
        handles = []
        for kind, (marker, size) in markers.items():
            if kind in self.kind.values():
                style: dict[str, Any] = {"marker": marker, "ms": size, "mfc": FILL[kind], "mec": EDGE[kind]}
                handles.append(Line2D([], [], linestyle="", label=kind, **style))
        single = {data["bandwidth"] / data.get("nvlinks", 1) for *_, data in self.graph.edges(data=True)}
        for bandwidth in reversed(_few(sorted(single), 5)):
            handles.append(Line2D([], [], color=LINK, lw=self._width(bandwidth), label=f"{bandwidth / 1e9:.3g} GB/s"))
        wide = self.ax.figure.bbox.width / self.ax.figure.dpi > 7
        self.ax.legend(
            handles=handles,
            loc="upper center",
            bbox_to_anchor=(0.5, 0.0),
            borderaxespad=2.0 if self.layout.boxes else 0.5,
            ncols=min(len(handles), 8 if wide else 4),
            frameon=False,
            fontsize=8,
            handlelength=2.2,
        )


def _few(values: list[float], most: int) -> list[float]:
    """At most so many of the values, the first and the last among them."""
    if len(values) <= most:
        return values
    return [values[round(index * (len(values) - 1) / (most - 1))] for index in range(most)]


def _rounded(left: float, right: float, low: float, high: float, corner: float, **style: Any) -> FancyBboxPatch:
    return FancyBboxPatch((left, low), right - left, high - low, boxstyle=f"round,pad=0,rounding_size={corner}", **style)


def _arrowhead(line: list[Point], size: float) -> list[Point]:
    """A triangle a little behind the middle of a parabola."""
    (x0, y0), (x1, y1), (x2, y2) = line
    t = 0.6
    x = (1 - t) ** 2 * x0 + 2 * t * (1 - t) * x1 + t**2 * x2
    y = (1 - t) ** 2 * y0 + 2 * t * (1 - t) * y1 + t**2 * y2
    dx, dy = (1 - t) * (x1 - x0) + t * (x2 - x1), (1 - t) * (y1 - y0) + t * (y2 - y1)
    length = math.hypot(dx, dy) or 1.0
    dx, dy = size * dx / length, size * dy / length
    return [(x + dx, y + dy), (x - dx - 0.6 * dy, y - dy + 0.6 * dx), (x - dx + 0.6 * dy, y - dy - 0.6 * dx)]


def _last(node: Node) -> str:
    """`_last("node0/gpu3") == "gpu3"`: the shade behind it says the rest."""
    return str(node).rpartition("/")[2]
