"""Tensors whose elements do not lie side by side, made so for the length of a transfer.

A wire carries one run of bytes. A transposed matrix, a column, or a tensor on a device that the transport cannot
read is copied once into such a run before it is sent, and copied back once after it was received.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from d2lps.comm.aliasing import check_writable


def stage(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """The elements of `tensor` as one flat contiguous tensor on `device`: its own memory if it can be, else a copy."""
    tensor = tensor.detach().resolve_conj().resolve_neg()  # what is only marked as conjugated is so on the wire
    if device is not None and tensor.device.type != device.type:
        tensor = tensor.to(device)
    return tensor.contiguous().view(-1)


def unstage(staged: torch.Tensor, tensor: torch.Tensor) -> None:
    """Write what arrived in `staged` back to `tensor`; nothing to do where both are the same memory."""
    if staged.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
        tensor.detach().copy_(staged.view(tensor.shape))


@contextmanager
def flat(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """`tensor` as a flat view to read and write; a strided tensor as a copy that is written back at the end.

    >>> column = torch.zeros(2, 2)[:, 0]
    >>> with flat(column) as run:
    ...     run += 1
    >>> column
    tensor([1., 1.])
    """
    check_writable(tensor)
    run = stage(tensor)
    yield run
    unstage(run, tensor)
