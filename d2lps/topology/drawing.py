"""A topology as a picture: shapes say what a node is, a link's width its bandwidth, its color what you like."""

import math
import re
from collections.abc import Collection, Hashable, Mapping
from typing import Any

import matplotlib.pyplot as plt
import networkx as nx
import numpy as np
from matplotlib import patches, path, ticker

from d2lps import figures
from d2lps.topology.layout import MOST, layout

FILL = {"device": "#cfe3f3", "host": "#fbe3b5", "switch": "#dddddd"}
EDGE = {"device": "#0072b2", "host": "#b97a00", "switch": "#555555"}
LINK, BOX, WIDEST = "#8a8a8a", "#f4f4f4", 5.0
SHADES = figures.shades(figures.RED)


def draw(
    graph: nx.DiGraph, title: str, ax: plt.Axes | None = None, *,
    links: Mapping[tuple[Hashable, Hashable], float] | None = None, label: str = "",
    hide: Collection[Hashable] = (), names: bool = True, legend: bool = True,
) -> plt.Axes:  # fmt: skip
    """Devices are squares, hosts hexagons, switches rounded bars; a link's width grows with the root of its bandwidth.

    links: {(src, dst): value}, bytes or utilization for example, colors each direction of the links, `label` says of what;
    those whose value is 0, or that have none, stay gray. hide: nodes to leave out: `dgx1.draw(hide=dgx1.hosts + dgx1.switches)`.

    >>> trace = simulate(all_reduce_once, cluster).trace                            # doctest: +SKIP
    >>> cluster.draw(links=trace.utilization(), label="utilization")                # doctest: +SKIP
    """
    if strangers := [node for node in hide if node not in graph]:
        raise ValueError(f"hide has {strangers}, which {title} has not")
    shown = graph.copy()
    shown.remove_nodes_from(hide)
    if len(shown) > MOST:
        raise ValueError(f"{title} has {len(shown)} nodes, and a picture has room for {MOST}: draw a smaller one of its kind")
    if not shown:
        raise ValueError(f"nothing of {title} is left to draw")
    for link in links or ():
        if link not in graph.edges:
            raise ValueError(f"links has a value for {link!r}, which is no link of {title}")
    picture = _Picture(graph, shown, title, ax)
    picture.links() if links is None else picture.lanes(links, label)
    if names:
        picture.names()
    if legend:
        picture.legend()
    return picture.ax


class _Picture:
    """Points of it are complex numbers, so that to turn is to multiply: 1j * way is what lies to the left of a way."""

    def __init__(self, whole: nx.DiGraph, shown: nx.DiGraph, title: str, ax: plt.Axes | None) -> None:
        self.graph, self.layout = shown, layout(whole)
        self.kind = dict(shown.nodes(data="kind"))
        self.fastest = max((bandwidth for *_, bandwidth in whole.edges(data="bandwidth")), default=1.0)
        # From the unit square to a plane in which both axes have the same scale.
        self.at = {node: complex(x, y * self.layout.aspect) for node, (x, y) in self.layout.positions.items() if node in shown}
        free = [at for node, at in self.at.items() if node not in self.layout.bars]
        nearest = min((abs(a - b) for a in free for b in self.at.values() if a != b), default=1.0)
        self.size = min(0.04, 0.36 * nearest)  # half the width of a device: all are alike, and no two nodes touch
        self.gap = 0.36 * self.size  # between the lanes of one link
        if ax is None:
            width = min(max(5.0, 0.36 / self.size), 11.0)
            _, ax = plt.subplots(figsize=(width, width * self.layout.aspect + 0.9), layout="constrained")
        self.ax = ax
        for node in self.at:
            ax.add_patch(self._shape(node))
        self._boxes()
        ax.set_aspect("equal")
        ax.margins(0.02)
        ax.autoscale_view()
        ax.axis("off")
        ax.set_title(title, fontsize="medium")

    def _half(self, node: Hashable) -> float:
        """Half a node's width."""
        return self.layout.bars.get(node, 2 * self.size * (1.8 if self.kind[node] == "switch" else 1.0)) / 2

    def _points(self, length: float) -> float:
        """A length of the plane, in points of the page."""
        self.ax.apply_aspect()
        here, there = self.ax.transData.transform([(0, 0), (length, 0)])
        return float(72 * (there - here)[0] / self.ax.figure.dpi)

    # ---- nodes ----------------------------------------------------------------------------------------------------

    def _shape(self, node: Hashable) -> patches.Patch:
        at, kind, half = self.at[node], self.kind[node], self._half(node)
        size = max(self.size, 0.02) if node in self.layout.bars else self.size
        style: dict[str, Any] = {"facecolor": FILL[kind], "edgecolor": EDGE[kind], "linewidth": 1.2, "zorder": 3}
        if kind == "host":
            return patches.RegularPolygon((at.real, at.imag), 6, radius=1.2 * size, **style)
        high, corner = (0.75 * size, 0.75 * size) if kind == "switch" else (size, 0.2 * size)
        return _rounded(at - complex(half, high), at + complex(half, high), corner, **style)

    def _boxes(self) -> None:
        """A shade behind what stands together, with its name below."""
        pad = 0.5 * self.size
        below: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "top", "fontsize": 8}
        for name, nodes in self.layout.boxes.items():
            if sides := [self.at[node] + side * self._half(node) for node in nodes if node in self.at for side in (-1, 1)]:
                xs, ys = np.real(sides), np.imag(sides)
                low, high = complex(xs.min() - pad, ys.min() - 3 * pad), complex(xs.max() + pad, ys.max() + 3 * pad)
                self.ax.add_patch(_rounded(low, high, pad, facecolor=BOX, edgecolor="#cccccc", linewidth=0.6, zorder=0))
                self.ax.annotate(name, ((low + high).real / 2, low.imag), (0, -3), **below)

    def names(self) -> None:
        for node, at in self.at.items():
            text, font = self._name(node)
            self.ax.text(at.real, at.imag, text, ha="center", va="center", fontsize=font, zorder=4)

    def _name(self, node: Hashable) -> tuple[str, float]:
        """What is written on a node, and how large: where "gpu12" would be too small, "12" says enough."""
        name, room = _last(node), self._points(2 * self._half(node))
        longest = max(len(_last(other)) for other in self.at if self.kind[other] == self.kind[node])
        if 1.5 * room / longest < 5.5:
            name = re.sub(r"^\D+(?=\d)", "", name)
            longest = len(name)
        return name, min(9.0, 1.5 * room / longest, 0.5 * room)

    # ---- links ----------------------------------------------------------------------------------------------------

    def links(self) -> None:
        """One line for both directions if they are alike; a doubled link as two lines."""
        number = {node: number for number, node in enumerate(self.graph)}
        for src, dst, data in self.graph.edges(data=True):
            if self.graph.get_edge_data(dst, src, default={}).get("bandwidth") != data["bandwidth"]:
                self._line(src, dst, self._width(data["bandwidth"]), LINK, -self.gap / 2, head=True)
            elif number[src] <= number[dst]:
                count = int(data.get("nvlinks", 1))
                for lane in range(count):
                    self._line(src, dst, self._width(data["bandwidth"] / count), LINK, (lane - (count - 1) / 2) * self.gap)

    def lanes(self, values: Mapping[tuple[Hashable, Hashable], float], label: str) -> None:
        """Each direction on its own, colored by its value, on the right-hand side."""
        most = max(values.values(), default=1.0) or 1.0
        norm = plt.Normalize(0.0, most)
        edges = self.graph.edges(data="bandwidth")
        for src, dst, bandwidth in sorted(edges, key=lambda edge: values.get(edge[:2], -1.0)):
            value = values.get((src, dst))
            width, color = (self._width(bandwidth), SHADES(norm(value))) if value else (0.5, LINK)
            self._line(src, dst, width, color, -self.gap / 2, head=bool(value))
        look: dict[str, Any] = {"shrink": 0.7, "pad": 0.02, "format": ticker.EngFormatter() if most >= 1000 else None}
        bar = self.ax.figure.colorbar(plt.cm.ScalarMappable(norm, SHADES), ax=self.ax, label=label, **look)
        bar.outline.set_visible(False)

    def _width(self, bandwidth: float) -> float:
        return max(0.5, min(WIDEST, self._points(0.22 * self.size)) * math.sqrt(bandwidth / self.fastest))

    def _line(self, src: Hashable, dst: Hashable, width: float, color: Any, shift: float, head: bool = False) -> None:
        """`shift`ed to the left of its way, with an arrowhead a little behind its middle where that matters."""
        start, end = self._end(src, dst), self._end(dst, src)
        way = (end - start) / (abs(end - start) or 1.0)
        start, end = start + 1j * way * shift, end + 1j * way * shift
        self.ax.add_patch(patches.PathPatch(path.Path(_pairs(start, end)), edgecolor=color, linewidth=width, zorder=1))
        if head:
            middle, long = 0.4 * start + 0.6 * end, 0.3 * self.size * way
            corners = _pairs(middle + long, middle - (1 - 0.6j) * long, middle - (1 + 0.6j) * long)
            self.ax.add_patch(patches.Polygon(corners, facecolor=color, edgecolor="none", zorder=2))

    def _end(self, node: Hashable, other: Hashable) -> complex:
        """Where a link meets a node: a wide switch straight above or below the other end."""
        at = self.at[node]
        if node not in self.layout.bars:
            return at
        half = self._half(node) - self.size
        return complex(min(max(self.at[other].real, at.real - half), at.real + half), at.imag)

    # ---- legend ---------------------------------------------------------------------------------------------------

    def legend(self) -> None:
        """The shapes that there are, and the widths of up to five bandwidths."""
        bar = _rounded(-1 - 0.45j, 1 + 0.45j, 0.45).get_path()
        handles = [
            plt.Line2D([], [], linestyle="", label=kind, marker=marker, ms=size, mfc=FILL[kind], mec=EDGE[kind])
            for kind, marker, size in (("device", "s", 9), ("host", "h", 9), ("switch", bar, 13))
            if kind in self.kind.values()
        ]
        single = sorted({data["bandwidth"] / data.get("nvlinks", 1) for *_, data in self.graph.edges(data=True)}, reverse=True)
        for bandwidth in dict.fromkeys(single[k * (len(single) - 1) // 4] for k in range(5) if single):
            handles.append(plt.Line2D([], [], color=LINK, lw=self._width(bandwidth), label=f"{bandwidth / 1e9:.3g} GB/s"))
        below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0), "borderaxespad": 2.0}
        self.ax.legend(handles=handles, ncols=min(len(handles), 6), frameon=False, fontsize=8, handlelength=2.2, **below)


def _pairs(*points: complex) -> list[tuple[float, float]]:
    return [(point.real, point.imag) for point in points]


def _rounded(low: complex, high: complex, corner: float, **style: Any) -> patches.FancyBboxPatch:
    """A box between its lower left and its upper right corner."""
    size, box = high - low, f"round,pad=0,rounding_size={corner}"
    return patches.FancyBboxPatch((low.real, low.imag), size.real, size.imag, boxstyle=box, **style)


def _last(node: Hashable) -> str:
    """`_last("node0/gpu3") == "gpu3"`: the shade behind it says the rest."""
    return str(node).rpartition("/")[2]
