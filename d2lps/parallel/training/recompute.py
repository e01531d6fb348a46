"""Activations that are computed again in the backward pass, in place of being kept from the forward pass."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from d2lps.parallel.dropout import Place
from d2lps.parallel.experts import Experts
from d2lps.parallel.transformer import MLP, Attention, Block


def recompute(model: nn.Module, what: str, place: Place) -> None:
    """Keep less of a Transformer's forward pass: changed in place, and nothing of what it computes.

    >>> recompute(model, "full", place)                     # doctest: +SKIP

    what: "full": of a block only its input is kept, which costs a forward pass more, communication too. "selective": attention's
    scores and weights are not, most of what is kept and little of what is computed. "activation": what an MLP's nonlinear
    function has made is not, the widest tensor that is cheap to make again. "none". place: of dropout (`dropout.py`), whose
    masks are then those of the first time, as the place is put back to where it was.
    Source: Chen et al. 2016; Korthikanti et al. 2022 for "selective".
    """
    for part in model.modules():
        if what == "full" and isinstance(part, Block):
            part.forward = _again(part.forward, place)  # type: ignore[method-assign]
        elif what == "selective" and isinstance(part, Attention):
            part.attend = _again(part.attend, place)
        elif what == "activation" and isinstance(part, MLP | Experts):  # with the product behind it: there the second time ends
            part.lower = _again(part.lower, place)  # type: ignore[method-assign]


def _again(function: Callable[..., Any], place: Place) -> Callable[..., Any]:
    def forward(*inputs: Any) -> Any:
        rows = place.rows

        def compute(*inputs: Any) -> Any:
            place.rows = rows  # those of now, while the backward pass of another micro-batch may come first
            return function(*inputs)

        return checkpoint(compute, *inputs, use_reentrant=False, preserve_rng_state=False)

    return forward
