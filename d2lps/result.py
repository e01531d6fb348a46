"""What a run gives back, in whichever world it ran."""

from typing import TYPE_CHECKING, Any

from d2lps.trace import Trace


class Run(list[Any]):
    """The results by rank, how long it took, and, on request, what happened.

    >>> run = d2lps.run(lambda comm: comm.rank * 2, 4)      # doctest: +SKIP
    >>> run == [0, 2, 4, 6], run[3], len(run)               # doctest: +SKIP
    (True, 6, 4)
    """

    def __init__(self, results: list[Any], time: float, trace: Trace | None = None) -> None:
        super().__init__(results)
        self.time = time  # seconds, from the start of the function until the last rank returned
        self._trace = trace

    @property
    def results(self) -> list[Any]:
        """A plain list of them."""
        return list(self)

    @property
    def trace(self) -> Trace:
        """What every rank did; recorded when the run was started with `trace=True`."""
        if self._trace is None:
            raise ValueError("this run left no trace: start it with trace=True")
        return self._trace

    if not TYPE_CHECKING:  # for which any name would be one then

        def __getattr__(self, name: str) -> Any:
            here = f": its trace has, run.trace.{name}" if hasattr(Trace, name) else ""
            raise AttributeError(f"a Run has no {name!r}{here}")

    def __repr__(self) -> str:
        return f"Run({super().__repr__()})"
