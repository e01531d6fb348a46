"""What ranks tell one another, and do together: what one of them can't, all hear of."""

import json
from collections.abc import Callable
from typing import Any

import torch

from d2lps.collectives import all_gather
from d2lps.comm import Communicator
from d2lps.disk import CheckpointDamaged, CheckpointMissing

_KINDS = {kind.__name__: kind for kind in (CheckpointMissing, CheckpointDamaged, OSError, ValueError)}


def all_gather_object(comm: Communicator, word: Any) -> list[Any]:
    """Every rank's `word`, by rank, as torch's function of this name; what JSON has. Two all-gathers, of lengths and of texts."""
    text = torch.frombuffer(bytearray(json.dumps(word).encode()), dtype=torch.uint8).to(comm.device)
    lengths = list(torch.zeros(comm.size, 1, dtype=torch.long, device=comm.device))
    all_gather(comm, lengths, torch.full_like(lengths[0], len(text)))
    room = [text.new_empty(int(length)) for length in lengths]
    all_gather(comm, room, text)
    return [json.loads(bytes(said.tolist())) for said in room]


def on_every_rank(comm: Communicator, function: Callable[[], Any]) -> list[Any]:
    """What the function returns on every rank, by rank; where it fails on some, all ranks raise that."""
    mine, cause = [None, "", ""], None
    try:
        mine[0] = function()
    except Exception as error:
        cause, kind = error, next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "")
        mine[1:] = kind, f"rank {comm.rank}: {error}" if kind else f"rank {comm.rank}: {error!r}"
    told = all_gather_object(comm, mine)
    if failed := [(kind, words) for _, kind, words in told if words]:
        raise _KINDS.get(failed[0][0], RuntimeError)("; ".join(words for _, words in failed)) from cause
    return [result for result, _, _ in told]
