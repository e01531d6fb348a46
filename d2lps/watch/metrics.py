"""What a rank of a training job says of itself while it trains, as Prometheus reads it.

In a job whose ranks wait for one another at every step, all of them take equally long: the rank that keeps the others waiting
is the one that waits least. So a rank says both, how long its steps take and how much of that it has waited.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import prometheus_client as prometheus

from d2lps.comm import Communicator
from d2lps.comm.watcher import Watcher

EDGES = (1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # seconds; the last bucket has what took longer
_DIRECTIONS = {"send": "sent", "recv": "received"}


class Metrics(Watcher):
    """A rank's numbers, at a port of its own for as long as the block lasts; called at the end of every step.

    >>> with Metrics(comm, "targets", tokens=8 * 64) as metrics:                                    # doctest: +SKIP
    ...     train(comm, transformer, plan, data, steps, batch=8, optimizer=adam, callback=metrics)

    Then `metrics.url` (http://127.0.0.1:43210/metrics) answers with

        d2lps_step_seconds          a histogram: from the end of a step to the end of the next; so not the first
        d2lps_waiting_seconds_total seconds of these steps in which the rank waited for others, and for their messages
        d2lps_bytes_total           of messages, by direction (sent, received) and axis of the mesh (ranks, if there is none)
        d2lps_tokens_total          this rank's share of the `tokens` that a step has on all ranks together
        d2lps_loss, d2lps_gradient_norm, d2lps_last_step_timestamp_seconds (of the Unix clock)

    and `folder`, if one is given, has an entry rank-3.json for Prometheus's file_sd, with the labels rank and node. A rank that
    comes to its end takes it along; one that fails or is killed leaves it, so that Prometheus sees that nobody answers.

    What the world's own all-reduce ("native") moves is not known, only the wait for it. address, port: 0 is any free port; beyond
    loopback whoever can reach it can read it.
    ValueError in a simulation, whose trace has all this; OSError for a taken port. Costs up to 10 us a message, 70 us a step.
    """

    def __init__(
        self, comm: Communicator, folder: str | Path = "", tokens: int = 0, address: str = "127.0.0.1", port: int = 0
    ) -> None:
        if comm.topology is not None:
            raise ValueError("Metrics are of real ranks: of a simulated run ask the trace, simulate(..., trace=True).trace")
        if folder:
            os.makedirs(folder, exist_ok=True)
        self.comm, self.tokens, self.url = comm, tokens / comm.size, ""
        self._entry = Path(folder) / f"rank-{comm.rank}.json" if folder else None
        self._address = address, port
        self._ended, self._waited = 0.0, 0.0  # when the last step did, and how long has been waited since
        self.registry = registry = prometheus.CollectorRegistry()
        self._seconds = prometheus.Histogram("d2lps_step_seconds", "from step to step", registry=registry, buckets=EDGES)
        self._waiting = prometheus.Counter("d2lps_waiting_seconds", "of them, waiting for others", registry=registry)
        self._bytes = prometheus.Counter("d2lps_bytes", "bytes of messages", ["direction", "axis"], registry=registry)
        self._tokens = prometheus.Counter("d2lps_tokens", "tokens trained on by this rank", registry=registry)
        self._gauges: dict[str, prometheus.Gauge] = {}  # from when they have a value: 0 would be one, and a wrong one

    def __enter__(self) -> Self:
        address, port = self._address
        self._server, self._thread = prometheus.start_http_server(port, address, self.registry)
        target = f"{address}:{self._server.server_port}"
        self.url = f"http://{target}/metrics"
        self.comm.watchers.append(self)
        if self._entry:
            labels = {"rank": str(self.comm.rank), "node": str(self.comm.node)}
            draft = self._entry.with_suffix(".draft")  # Prometheus may look at any moment
            draft.write_text(json.dumps([{"targets": [target], "labels": labels}]))
            os.replace(draft, self._entry)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.comm.watchers.remove(self)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        if self._entry and kind is None:
            self._entry.unlink()

    def moved(self, comm: Communicator, action: str, nbytes: int) -> None:
        self._bytes.labels(_DIRECTIONS[action], comm.axis).inc(nbytes)

    def waited(self, comm: Communicator, seconds: float) -> None:
        if comm.lane == 0:  # what goes on beside the rank's own work waits without costing it time
            self._waited += seconds

    def __call__(self, step: int, loss: float | None = None, norm: float | None = None) -> None:
        """A step has ended: what `train` calls its `callback` with."""
        now = self.comm.now()
        if self._ended:
            self._seconds.observe(now - self._ended)
            self._tokens.inc(self.tokens)
            self._waiting.inc(self._waited)  # now, as the step's seconds: one without the other would mislead
        self._ended, self._waited = now, 0.0
        self._set("d2lps_loss", "loss of the last step", loss)
        self._set("d2lps_gradient_norm", "before it is clipped", norm)
        self._set("d2lps_last_step_timestamp_seconds", "when it ended, by the Unix clock", time.time())

    def _set(self, name: str, told: str, value: float | None) -> None:
        if value is not None:
            if name not in self._gauges:
                self._gauges[name] = prometheus.Gauge(name, told, registry=self.registry)
            self._gauges[name].set(value)
