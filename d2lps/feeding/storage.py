"""Where data lie: a parallel file system or an object store, as a cluster in which servers are ranks and readers wait for them.

Between a reader and a server is a connection, on which one request is answered after another; at its far end sits a rank. All
ends of one server live on one node, share its link, and share its disks, which are that node's `Device`: a request takes them
`per_request` seconds and then its bytes, be they read or written, while these bytes pass the network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

import networkx as nx
import torch

from d2lps.arguments import whole
from d2lps.comm import Communicator, Work
from d2lps.result import Run
from d2lps.simulator import simulate
from d2lps.topology import Device, Topology
from d2lps.topology.graph import connect

STOP, READ, WRITE = range(3)
PLENTY = 1e18  # bytes: more than anybody stores


@dataclass(frozen=True)
class Storage:
    """
    servers: of all readers together (a parallel file system's object storage targets), or, if `private`, of each reader (its
    connections to an object store that has more servers than it will ever see). bandwidth: of a server's disks, or of such a
    connection, bytes/s. latency: s until the first byte comes, beside others. per_request: s that each request keeps the server's
    disks busy besides its bytes. lookup: s of the one metadata server for each file that is opened; 0, none is needed.
    port: bytes/s of each machine's link.

    >>> store = Storage(servers=1, bandwidth=100e6, latency=0.030, private=True)
    >>> round(store.request(1e6), 3)            # 30 ms of latency, 10 ms for the bytes
    0.04
    >>> def read_two(comm, mount):
    ...     for work in [mount.read(1_000_000), mount.read(1_000_000)]:         # on one connection: one after the other
    ...         work.wait()
    >>> round(store.simulate(read_two, readers=1).time, 3)
    0.08
    """

    servers: int
    bandwidth: float
    latency: float
    per_request: float = 0.0
    lookup: float = 0.0
    port: float = 12.5e9
    private: bool = False

    def __post_init__(self) -> None:
        whole("servers", self.servers)
        for name, least in (("bandwidth", 1e-9), ("port", 1e-9), ("latency", 0.0), ("per_request", 0.0), ("lookup", 0.0)):
            if not least <= getattr(self, name) < inf:
                raise ValueError(f"{name}={getattr(self, name)!r} is not a finite number {'above' if least else 'from'} 0")

    # ---- formulas -------------------------------------------------------------------------------------------------

    def request(self, nbytes: float) -> float:
        """Seconds of one request for so many bytes, when nobody else asks: latency, then disks and port at the same time."""
        if not 0 < nbytes < inf:
            raise ValueError(f"nbytes={nbytes!r} is not a number above 0")
        return self.latency + max(self.per_request + nbytes / self.bandwidth, nbytes / self.port)

    def rate(self, nbytes: float, outstanding: int = 1, readers: int = 1, per_file: float = 1) -> float:
        """Requests a second that each of `readers` gets answered, for so many bytes each, that many of them under way at a time.

        >>> store = Storage(servers=64, bandwidth=90e6, latency=0.1, private=True)
        >>> [round(store.rate(100e3, outstanding=n)) for n in (1, 10, 64)]
        [10, 99, 633]

        The least of four: outstanding / seconds of a request (Little's law), what the servers do, what the port carries, and one
        lookup after the other for each file of `per_file` requests (inf, where files are open), with all other readers before the
        metadata server. The first three are bounds; the lookups' is for readers in step, as ranks of one job are (those who come
        one after the other get up to 1 / (readers lookup) each).
        """
        whole("outstanding", outstanding), whole("readers", readers)
        busy = self.per_request + nbytes / self.bandwidth
        opening = (self.latency + self.lookup * readers) / per_file if self.lookup else 0.0
        asked = min(outstanding, self.servers) / (self.request(nbytes) + opening)
        served = self.servers / busy / (1 if self.private else readers)
        return min(asked, served, self.port / nbytes, 1 / opening if opening else inf)

    # ---- simulation -----------------------------------------------------------------------------------------------

    def topology(self, readers: int) -> Topology:
        """Readers reader0, reader1, ... and servers around one network that does not block."""
        graph = nx.DiGraph(preset="switch")
        for reader in range(whole("readers", readers)):
            graph.add_node(f"reader{reader}", kind="device")
            connect(graph, f"reader{reader}", "network", self.port, 0.0)
        disks = Device(flops=1.0, memory=PLENTY, memory_bandwidth=self.bandwidth, launch=self.per_request)
        for server in dict.fromkeys(node for reader in range(readers) for node in self._servers(reader)):
            graph.add_node(server, kind="host", forwards=False, device=disks)
        if self.lookup:
            busy = Device(flops=1.0, memory=PLENTY, memory_bandwidth=PLENTY, launch=self.lookup)
            graph.add_node("metadata", kind="host", forwards=False, device=busy)
        for node in [node for node, kind in graph.nodes(data="kind") if kind == "host"]:
            connect(graph, node, "network", self.port, 0.0)
        return Topology(graph, f"storage of {self.servers} servers")

    def _servers(self, reader: int) -> list[str]:
        return [f"server{reader}.{k}" if self.private else f"server{k}" for k in range(self.servers)]

    def simulate(self, work: Callable[..., Any], readers: int, *args: Any, **options: Any) -> Run:
        """Call `work(comm, mount, *args)` on each reader, in virtual time; the results are the readers'.

        comm: the readers' own communicator. options: of `d2lps.simulate`. Payloads have no content.
        """
        def life(comm: Communicator) -> Any:
            reading = comm.rank < readers
            group = comm.split(0 if reading else 1)
            if not reading:
                return _serve(comm, (comm.rank - readers) // ends, self.latency)
            mount = Mount(comm, self, readers + comm.rank * ends)
            result = work(group, mount, *args)
            mount.close()
            return result

        homes = [self._servers(reader) + ["metadata"] * bool(self.lookup) for reader in range(whole("readers", readers))]
        ends = len(homes[0])
        nodes = [f"reader{reader}" for reader in range(readers)] + [node for home in homes for node in home]
        run = simulate(life, self.topology(readers), ranks=nodes, device="meta", **options)
        return Run(run.results[:readers], run.time, run._trace)


class Mount:
    """A reader's connections to a `Storage`, on which it asks in turn."""

    def __init__(self, comm: Communicator, storage: Storage, first: int) -> None:
        self.comm, self.storage, self.first, self.asked = comm, storage, first, 0

    def read(self, nbytes: int) -> Work:
        """Ask the next server for so many bytes; they are there when the Work has been waited for."""
        return self._ask(READ, nbytes)

    def write(self, nbytes: int) -> Work:
        """Have the next server write so many bytes; they are on its disks when the Work has been waited for."""
        return self._ask(WRITE, nbytes)

    def open(self) -> None:
        """Ask the metadata server where a file's pieces are."""
        if self.storage.lookup:
            self._say(READ, 1, self.first + self.storage.servers).wait()

    def close(self) -> None:
        """Let the servers end."""
        for end in range(self.storage.servers + bool(self.storage.lookup)):
            self.comm.send(torch.tensor([STOP, 0]), self.first + end)

    def _ask(self, what: int, nbytes: int) -> Work:
        self.asked += 1
        return self._say(what, nbytes, self.first + (self.comm.rank + self.asked - 1) % self.storage.servers)

    def _say(self, what: int, nbytes: int, end: int) -> Work:
        """A request, its bytes, this way or that, and a last one that says it is done."""
        post = self.comm.isend if what == WRITE else self.comm.irecv
        posted = [self.comm.isend(torch.tensor([what, whole("nbytes", nbytes)]), end), post(_blank(nbytes), end)]
        posted.append(self.comm.irecv(_blank(1), end))

        def finish() -> None:
            for work in posted:
                work.wait()

        return Work(finish, lambda: all(work.is_done() for work in posted))


def _serve(comm: Communicator, reader: int, latency: float) -> None:
    """The far end of one connection: what is asked is answered, one request after the other."""
    while True:
        comm.recv(request := torch.zeros(2, dtype=torch.int64), reader)
        what, nbytes = request.tolist()
        if what == STOP:
            return
        comm.sleep(latency)  # beside others' requests: it keeps nobody busy
        data = (comm.irecv if what == WRITE else comm.isend)(_blank(nbytes), reader)
        with comm.compute("write" if what == WRITE else "read", flops=0, bytes=nbytes):
            pass
        data.wait()
        comm.send(_blank(1), reader)


def _blank(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")
