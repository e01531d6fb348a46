"""What a run is given and gives back, in whichever world it runs."""

import io
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch

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


class _Packer(cloudpickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """torch's own way takes the whole storage along, of which a view may be the smallest part."""
        if type(value) is torch.Tensor and value.layout is torch.strided and value.untyped_storage().nbytes() > value.nbytes:
            value = value.detach().clone().requires_grad_(value.requires_grad)
            return value.__reduce_ex__(cloudpickle.DEFAULT_PROTOCOL)
        return super().reducer_override(value)


def pickled(value: Any) -> bytes:
    """As it goes to another rank or process: `pickled(big[:1])` has one element, and not all of `big`."""
    _Packer(file := io.BytesIO()).dump(value)
    return file.getvalue()
