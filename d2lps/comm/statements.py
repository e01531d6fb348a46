"""What ranks tell one another when they compare their calls, outside the trace."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

STATEMENT = 512  # bytes of a statement, so that ranks with different ones can still exchange them


def packed(word: Any) -> bytes:
    """Numbers, or a text, of which a long one ends in its hash: `packed([1, None])[:9] == b"[1, null]"`."""
    told = json.dumps(word, ensure_ascii=False).encode()
    if len(told) > STATEMENT:
        told = json.dumps(word[: STATEMENT // 8] + hashlib.sha1(told).hexdigest()).encode()
    return told.ljust(STATEMENT)


def by_statement(said: Sequence[str], members: Sequence[int]) -> str:
    """`rank 2 calls broadcast(src=1); ranks 0, 1, 3 call broadcast(src=0)`: the few first."""
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, statement in zip(members, said, strict=True):
        groups[statement].append(rank)
    parts = []
    for statement, ranks in sorted(groups.items(), key=lambda item: (len(item[1]), item[1])):
        who = f"rank {ranks[0]} calls" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} call"
        parts.append(f"{who} {statement}")
    return "; ".join(parts)
