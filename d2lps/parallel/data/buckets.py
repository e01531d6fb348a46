"""Gradients in buckets: one all-reduce for many small tensors, and one that begins before all of them are there."""

from collections.abc import Sequence

import torch
from torch import Tensor

from d2lps.cost.numbers import whole

MIB = 2**20


def buckets(tensors: Sequence[Tensor], cap: int = 25 * MIB, first: int = MIB) -> list[list[int]]:
    """Which tensors share a bucket, by their numbers: those that are used last come first, as their gradients do.

    >>> layers = [torch.empty(100), torch.empty(10), torch.empty(30), torch.empty(20)]  # 400, 40, 120 and 80 bytes
    >>> buckets(layers, cap=150, first=60)
    [[3], [2, 1], [0]]

    tensors: in the order in which the forward pass uses them. A bucket is full once it holds `cap` bytes or more, the first one
    `first`, which is small, so that the first message leaves early; so a bucket may hold a tensor's bytes more than its cap.
    Tensors of one bucket have one dtype and one device. The numbers are as in `tensors`.
    Source: Li et al. 2020; torch's own function gives the same (`dist._compute_bucket_assignment_by_size`).
    """
    whole("cap", cap)
    whole("first", first)
    full: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    limits: dict[tuple[torch.dtype, torch.device], int] = {}
    for number in reversed(range(len(tensors))):
        kind = tensors[number].dtype, tensors[number].device
        bucket = filling.setdefault(kind, [])
        bucket.append(number)
        if sum(tensors[other].nbytes for other in bucket) >= limits.get(kind, first):
            full.append(filling.pop(kind))
            limits[kind] = cap
    return full + list(filling.values())


def flatten(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """One flat tensor with room for all of these, and a view of it for each, of its shape.

    >>> flat, (weight, bias) = flatten([torch.empty(2, 3), torch.empty(3)])
    >>> weight.fill_(1), bias.fill_(2)
    (tensor([[1., 1., 1.],
            [1., 1., 1.]]), tensor([2., 2., 2.]))
    >>> flat
    tensor([1., 1., 1., 1., 1., 1., 2., 2., 2.])

    Nothing is copied, now or later: what is written into a view is in the flat tensor, which can be sent as it is.
    """
    flat = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors), requires_grad=False)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return flat, [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
