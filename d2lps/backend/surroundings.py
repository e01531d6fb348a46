"""What a thread has to take over from the one that called: autograd's mode, and the order of work on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


def surroundings(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Called by the program's thread; what it returns is entered by the thread that does the work."""
    inference = torch.is_inference_mode_enabled()
    if device.type != "cuda":
        return lambda: _modes(inference)
    ready = torch.cuda.current_stream(device).record_event()
    return lambda: _on_gpu(device, ready, inference)


@contextmanager
def _modes(inference: bool) -> Iterator[None]:
    """Nothing that a collective does is to be differentiated; and only inside inference mode its tensors may be written."""
    with torch.inference_mode() if inference else torch.no_grad():
        yield


@contextmanager
def _on_gpu(device: torch.device, ready: torch.cuda.Event, inference: bool) -> Iterator[None]:
    """On a stream of its own, after what the program had asked for before; the GPU has done it when the block ends."""
    stream = torch.cuda.Stream(device)
    stream.wait_event(ready)
    with torch.cuda.stream(stream), _modes(inference):
        yield
        stream.synchronize()
