"""The record of a run: who sent which part of what to whom, when, and what each rank did with it."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from d2lps.trace import perfetto, timeline
from d2lps.trace.replay import Replay
from d2lps.trace.tables import Tables


class Trace(Tables):
    """A run's tables, and what is asked of them most: bytes, rounds, pictures.

    >>> trace = d2lps.run(work, 4, trace=True).trace            # doctest: +SKIP
    >>> trace.messages["nbytes"].sum(), trace.rounds, trace.bytes_by_link()[0, 1]      # doctest: +SKIP
    (960, 6, 240)
    """

    def __repr__(self) -> str:
        return f"<Trace: {self.ranks} ranks, {len(self)} messages, {self.messages['nbytes'].sum():,} bytes>"

    # ---- sums -----------------------------------------------------------------------------------------------------

    def bytes_sent(self) -> np.ndarray:
        """Bytes that each rank sent, by rank."""
        return np.bincount(self.messages["src"], self.messages["nbytes"], self.ranks).astype(np.int64)

    def bytes_received(self) -> np.ndarray:
        """Bytes that each rank received, by rank."""
        return np.bincount(self.messages["dst"], self.messages["nbytes"], self.ranks).astype(np.int64)

    def bytes_by_link(self) -> dict[tuple[int, int], int]:
        """{(src, dst): bytes} for every pair of ranks between which a message went."""
        pairs = self.messages["src"].astype(np.int64) * self.ranks + self.messages["dst"]
        totals = np.bincount(pairs, self.messages["nbytes"], self.ranks**2).astype(np.int64)
        return {divmod(int(pair), self.ranks): int(totals[pair]) for pair in np.unique(pairs)}

    def bytes_on_links(self) -> dict[tuple[Any, Any], int]:
        """Of a simulated run: {(node, node): bytes} for every link of the cluster that carried any."""
        if self.topology is None:
            raise ValueError("only a simulated run knows its links; a real one knows bytes_by_link() between ranks")
        totals: dict[tuple[Any, Any], int] = {}
        for (src, dst), nbytes in self.bytes_by_link().items():
            for link in self.topology.route(self.nodes[src], self.nodes[dst]).links:
                totals[self.topology.links[link]] = totals.get(self.topology.links[link], 0) + nbytes
        return totals

    def utilization(self) -> dict[tuple[Any, Any], float]:
        """Of a simulated run: the share of what each used link could have carried until the last message arrived."""
        length = float(np.nanmax(self.messages["end"], initial=0.0))
        edges = self.topology.graph.edges if self.topology is not None else {}
        return {link: nbytes / (edges[link]["bandwidth"] * length) for link, nbytes in self.bytes_on_links().items() if length}

    @property
    def rounds(self) -> int:
        """The longest chain of messages in which each had to wait for the one before: what latency multiplies."""
        return self.replay.rounds

    def steps_of(self, rank: int) -> int:
        """In how many of the rounds this rank sent or received."""
        touched = (self.messages["src"] == rank) | (self.messages["dst"] == rank)
        return len(np.unique(self.replay.round_of[touched]))

    def time_waiting(self) -> np.ndarray:
        """Seconds that each rank's own thread of control spent in waits, by rank."""
        own = self.waits["lane"] == 0
        seconds = (self.waits["end"] - self.waits["start"])[own]
        return np.bincount(self.waits["rank"][own], seconds, self.ranks)

    def summary(self) -> str:
        """A small table: per rank, the messages and bytes that it sent and received, and the rounds it took part in."""
        lines = [f"{'rank':>4} {'messages sent':>14} {'bytes sent':>12} {'bytes received':>15} {'rounds':>7}"]
        counts = np.bincount(self.messages["src"], minlength=self.ranks)
        for rank, (sent, received) in enumerate(zip(self.bytes_sent(), self.bytes_received(), strict=True)):
            lines.append(f"{rank:>4} {counts[rank]:>14,} {sent:>12,} {received:>15,} {self.steps_of(rank):>7}")
        lines.append(f"{len(self):,} messages, {self.messages['nbytes'].sum():,} bytes, {self.rounds} rounds")
        return "\n".join(lines)

    # ---- looking at it --------------------------------------------------------------------------------------------

    @cached_property
    def replay(self) -> Replay:
        """The run once more, event by event, in an order in which every cause comes before its effect."""
        return Replay(self)

    def timeline(self, ax: Any = None) -> Any:
        """Draw each rank and what goes on beside it: messages as arrows, computing, waiting and arithmetic as bars."""
        return timeline.draw(self, ax)

    def perfetto(self) -> dict[str, Any]:
        """The run in Chrome's trace event format, as a dictionary."""
        return perfetto.events(self)

    def save(self, path: str | Path) -> Path:
        """Write JSON that opens in ui.perfetto.dev and chrome://tracing; return the path."""
        path = Path(path)
        path.write_text(json.dumps(self.perfetto()))
        return path
