"""A class's contest of all-reduces as a table: who is right, and how fast, in the CSV that a spreadsheet reads."""

import csv
import io

from d2lps.topology import Topology
from d2lps_book.check.exercise import Function
from d2lps_book.check.exercises import contest


def leaderboard(entries: dict[str, Function], topology: Topology, nbytes: int = 160_000_000) -> str:
    """The contest of `entries`, functions of (comm, tensor) by their owners' names, as CSV: the fastest first, the wrong last.

    >>> from d2lps import collectives
    >>> from d2lps.topology import hgx_h100
    >>> def tree(comm, tensor):
    ...     collectives.all_reduce(comm, tensor, algorithm="tree")
    >>> print(leaderboard({"Ada": tree, "Bob": collectives.all_reduce, "Eve": lambda comm, tensor: None}, hgx_h100()))
    place,name,milliseconds,times the ring,verdict
    1,Bob,0.670,1.00,passed
    2,Ada,2.154,0.31,passed
    ,Eve,,,<lambda> is still empty
    <BLANKLINE>

    Times are the simulator's, so they are the same on every machine. Two who are equally fast share a place.
    """
    verdicts = {name: contest(function, topology, nbytes) for name, function in entries.items()}
    right = sorted((name for name, verdict in verdicts.items() if verdict), key=lambda name: verdicts[name].seconds)
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(["place", "name", "milliseconds", "times the ring", "verdict"])
    for name in right:
        found = verdicts[name]
        place = 1 + sum(verdicts[other].seconds < found.seconds for other in right)
        table.writerow([place, name, f"{found.seconds * 1e3:.3f}", f"{found.factor:.2f}", "passed"])
    table.writerows(["", name, "", "", verdict.text] for name, verdict in verdicts.items() if not verdict)
    return out.getvalue()
