"""A topology as a picture: shapes say what a node is, a link's width its bandwidth, its colour what you like."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, ListedColormap, Normalize
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch, Patch, PathPatch, Polygon, RegularPolygon
from matplotlib.path import Path
from matplotlib.ticker import EngFormatter

from d2lps.topology.curves import Point, arrowhead, curve
from d2lps.topology.graph import Node, Topology
from d2lps.topology.layout import Layout, layout, positions

__all__ = ["draw", "positions"]

MOST = 80  # nodes; more cannot be told apart
FILL = {"device": "#cfe3f3", "host": "#fbe3b5", "switch": "#dddddd"}
EDGE = {"device": "#0072b2", "host": "#b97a00", "switch": "#555555"}
LINK, BOX, WIDEST = "#8a8a8a", "#f4f4f4", 5.0
COLORS = "YlOrRd"


def draw(
    topology: Topology,
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
    shown = [node for node in topology.nodes if node not in set(hide)]
    if len(shown) > MOST:
        raise ValueError(
            f"{topology.name} has {len(shown)} nodes, and a picture has room for {MOST}: draw a smaller one of its kind"
        )
    if not shown:
        raise ValueError(f"nothing of {topology.name} is left to draw")
    for link in links or ():
        if link not in topology.graph.edges:
            raise ValueError(f"links has a value for {link!r}, which is no link of {topology.name}")
    picture = _Picture(topology, layout(topology), shown, ax)
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
    def __init__(self, topology: Topology, found: Layout, shown: list[Node], ax: Axes | None) -> None:
        self.topology, self.layout, self.shown = topology, found, shown
        # From the unit square to a plane in which both axes have the same scale.
        self.at = {node: (found.places[node][0], found.places[node][1] * found.aspect) for node in shown}
        self.size = self._size()
        self.sizes = {node: self._size(self._kind(node)) for node in shown}
        if ax is None:
            width = min(max(5.0, 0.36 / self.size), 11.0)
            _, ax = plt.subplots(figsize=(width, width * found.aspect + 0.9), layout="constrained")
        self.ax = ax
        self.fastest = max(topology.bandwidth, default=1.0)
        self._frame()

    def _size(self, kind: str = "") -> float:
        """Half the width of the nodes of a kind: all are alike, none touch, and none are much larger than the others."""
        points = list(self.at.values())
        mine = [self.at[node] for node in self.shown if kind in ("", self._kind(node)) and node not in self.layout.bars]
        nearest = min((math.dist(a, b) for a in mine for b in points if a != b), default=1.0)
        return min(0.04, 0.36 * nearest, 1.5 * self.size if kind else 1.0)

    def _kind(self, node: Node) -> str:
        return str(self.topology.graph.nodes[node]["kind"])

    def _frame(self) -> None:
        xs = [x + side * self._half(node) for node, (x, _) in self.at.items() for side in (-1, 1)]
        ys = [y for _, y in self.at.values()]
        for (u, v), bend in self.layout.bends.items():
            if u in self.at and v in self.at:
                ys.append((self.at[u][1] + self.at[v][1]) / 2 + bend)
        margin = 1.5 * max(self.sizes.values())
        self.ax.set(xlim=(min(xs) - margin, max(xs) + margin), ylim=(min(ys) - margin, max(ys) + margin), aspect="equal")
        self.ax.axis("off")
        self.ax.set_title(self.topology.name, fontsize="medium")

    def _half(self, node: Node) -> float:
        """Half a node's width."""
        return self.layout.bars.get(node, 2 * self.sizes[node] * (1.3 if self._kind(node) == "switch" else 1.0)) / 2

    def _points(self, length: float) -> float:
        """A length of the plane, in points of the page."""
        box = self.ax.get_position()
        figure = self._figure()
        (left, right), (low, high) = self.ax.get_xlim(), self.ax.get_ylim()
        return float(72 * length * min(box.width * figure[0] / (right - left), box.height * figure[1] / (high - low)))

    def _figure(self) -> Point:
        """Its size in inches."""
        figure = self.ax.figure
        return figure.bbox.width / figure.dpi, figure.bbox.height / figure.dpi

    # ---- nodes ----------------------------------------------------------------------------------------------------

    def nodes(self, names: bool) -> None:
        for node, (x, y) in self.at.items():
            kind = self._kind(node)
            style: dict[str, Any] = {"facecolor": FILL[kind], "edgecolor": EDGE[kind], "linewidth": 1.2, "zorder": 3}
            self.ax.add_patch(self._shape(node, x, y, style))
            if names:
                text, font = self._name(node)
                self.ax.text(x, y, text, ha="center", va="center", fontsize=font, zorder=4)

    def _name(self, node: Node) -> tuple[str, float]:
        """What is written on a node, and how large: where "gpu12" would be too small, "12" says enough."""
        if node in self.layout.bars:
            return _last(node), 9.0
        room = self._points(2 * self._half(node))
        longest = max(len(_last(other)) for other in self.shown if self._kind(other) == self._kind(node))
        font = min(9.0, 1.5 * room / longest, 0.6 * room)
        if font >= 5.5:
            return _last(node), font
        return re.sub(r"^\D+(?=\d)", "", _last(node)), min(9.0, 0.5 * room)

    def _shape(self, node: Node, x: float, y: float, style: dict[str, Any]) -> Patch:
        kind, half, size = self._kind(node), self._half(node), self.sizes[node]
        if kind == "host":
            return RegularPolygon((x, y), 6, radius=1.2 * size, **style)
        if node in self.layout.bars:
            size = max(self.size, 0.02)
        high, corner = (0.75 * size, 0.75 * size) if kind == "switch" else (size, 0.2 * size)
        box = f"round,pad=0,rounding_size={corner}"
        return FancyBboxPatch((x - half, y - high), 2 * half, 2 * high, boxstyle=box, **style)

    def boxes(self) -> None:
        """A shade behind what stands together, with its name below."""
        for name, nodes in self.layout.boxes.items():
            points = [(x, y, self._half(node)) for node in nodes if node in self.at for x, y in [self.at[node]]]
            if not points:
                continue
            left, right = min(x - half for x, _, half in points), max(x + half for x, _, half in points)
            low, high = min(y for _, y, _ in points), max(y for _, y, _ in points)
            pad = 0.5 * self.size
            corner, width, height = (left - pad, low - 3 * pad), right - left + 2 * pad, high - low + 6 * pad
            style: dict[str, Any] = {"facecolor": BOX, "edgecolor": "#cccccc", "linewidth": 0.6, "zorder": 0}
            self.ax.add_patch(FancyBboxPatch(corner, width, height, boxstyle=f"round,pad=0,rounding_size={pad}", **style))
            self.ax.annotate(
                name, ((left + right) / 2, low - 3 * pad), (0, -3), textcoords="offset points", ha="center", va="top", fontsize=8
            )

    # ---- links ----------------------------------------------------------------------------------------------------

    def links(self) -> None:
        """One line for both directions if they are alike; a doubled link as two lines."""
        for src, dst in self.topology.links:
            if src not in self.at or dst not in self.at:
                continue
            here, back = self._data(src, dst), self._data(dst, src)
            if back and back["bandwidth"] == here["bandwidth"]:
                if self.topology.nodes.index(src) > self.topology.nodes.index(dst):
                    continue  # drawn already, from its other end
                count = int(here.get("nvlinks", 1))
                for lane in range(count):
                    self._line(src, dst, here["bandwidth"] / count, LINK, (lane - (count - 1) / 2) * self._gap())
            else:
                self._line(src, dst, here["bandwidth"], LINK, -self._gap() / 2, head=True)

    def lanes(self, values: Mapping[tuple[Node, Node], float], label: str) -> None:
        """Each direction on its own, coloured by its value, on the right-hand side."""
        norm, colors = Normalize(0.0, max(values.values(), default=1.0) or 1.0), _cut(plt.get_cmap(COLORS))
        for src, dst in sorted(self.topology.links, key=lambda link: values.get(link, -1.0)):
            if src in self.at and dst in self.at:
                value = values.get((src, dst)) or None
                color = LINK if value is None else colors(norm(value))
                bandwidth = self._data(src, dst)["bandwidth"]
                self._line(src, dst, bandwidth, color, -self._gap() / 2, head=value is not None, thin=value is None)
        bar = self.ax.figure.colorbar(ScalarMappable(norm, colors), ax=self.ax, shrink=0.7, pad=0.02)
        bar.set_label(label)
        bar.outline.set_visible(False)
        if norm.vmax and norm.vmax >= 1000:
            bar.formatter = EngFormatter()
            bar.update_ticks()

    def _data(self, src: Node, dst: Node) -> dict[str, Any]:
        return self.topology.graph.get_edge_data(src, dst, default={})

    def _gap(self) -> float:
        """Between the lanes of one link."""
        return 0.36 * self.size

    def _width(self, bandwidth: float) -> float:
        return max(0.5, min(WIDEST, self._points(0.22 * self.size)) * math.sqrt(bandwidth / self.fastest))

    def _line(
        self, src: Node, dst: Node, bandwidth: float, color: Any, shift: float, head: bool = False, thin: bool = False
    ) -> None:
        line = curve(self._end(src, dst), self._end(dst, src), self._bend(src, dst), shift)
        width = 0.5 if thin else self._width(bandwidth)
        path = Path(line, [Path.MOVETO, Path.CURVE3, Path.CURVE3])
        self.ax.add_patch(PathPatch(path, fill=False, edgecolor=color, linewidth=width, zorder=1))
        if head:
            self.ax.add_patch(Polygon(arrowhead(line, 0.3 * self.size), facecolor=color, edgecolor="none", zorder=2))

    def _end(self, node: Node, other: Node) -> Point:
        """Where a link meets a node: a wide switch straight above or below the other end."""
        x, y = self.at[node]
        if node in self.layout.bars:
            half = self._half(node) - self.size
            x = min(max(self.at[other][0], x - half), x + half)
        return x, y

    def _bend(self, src: Node, dst: Node) -> float:
        return self.layout.bends.get((src, dst), self.layout.bends.get((dst, src), 0.0))

    # ---- legend ---------------------------------------------------------------------------------------------------

    def legend(self) -> None:
        """The shapes that there are, and the widths of up to five bandwidths."""
        kinds = [kind for kind in FILL if any(self._kind(node) == kind for node in self.shown)]
        markers: dict[str, Any] = {"device": "s", "host": "h", "switch": _pill()}
        handles = []
        for kind in kinds:
            style: dict[str, Any] = {"mfc": FILL[kind], "mec": EDGE[kind], "ms": 13 if kind == "switch" else 9}
            handles.append(Line2D([], [], linestyle="", marker=markers[kind], label=kind, **style))
        shown = set(self.shown)
        links = [self.topology.graph.edges[link] for link in self.topology.links if shown.issuperset(link)]
        single = {data["bandwidth"] / data.get("nvlinks", 1) for data in links}
        for bandwidth in reversed(_few(sorted(single), 5)):
            handles.append(Line2D([], [], color=LINK, lw=self._width(bandwidth), label=f"{bandwidth / 1e9:.3g} GB/s"))
        self.ax.legend(
            handles=handles,
            loc="upper center",
            bbox_to_anchor=(0.5, 0.0),
            borderaxespad=2.0 if self.layout.boxes else 0.5,
            ncols=min(len(handles), 8 if self._figure()[0] > 7 else 4),
            frameon=False,
            fontsize=8,
            handlelength=2.2,
        )


def _few(values: list[float], most: int) -> list[float]:
    """At most so many of the values, the first and the last among them."""
    if len(values) <= most:
        return values
    return [values[round(index * (len(values) - 1) / (most - 1))] for index in range(most)]


def _cut(colors: Colormap) -> Colormap:
    """Without its palest part, which cannot be seen on white."""
    return ListedColormap([colors(0.12 + 0.88 * index / 255) for index in range(256)])


def _pill() -> Path:
    return FancyBboxPatch((-1.0, -0.45), 2.0, 0.9, boxstyle="round,pad=0,rounding_size=0.45").get_path()


def _last(node: Node) -> str:
    """`_last("node0/gpu3") == "gpu3"`: the shade behind it says the rest."""
    return str(node).rpartition("/")[2]
