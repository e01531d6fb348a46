"""The checks of *Many processes*: each refuses, in words, what readers hand in."""

import numpy as np
import torch
from solutions import refusing
from test_check_beyond_the_ring import to_and_from_0

from d2lps import Communicator, collectives


def in_one_box(comm: Communicator, parcels: list[torch.Tensor]) -> None:
    box = torch.stack(parcels)
    if comm.rank == 0:
        comm.send(box, 1)
    else:
        comm.recv(box, 0)
        for parcel, row in zip(parcels, box, strict=True):
            parcel.copy_(row)


FIRST, SECOND = "if rank < p - 1: -> ", "if rank < p - 2: -> "
MOVE, START = "move = comm.send if comm.rank == 0 else comm.recv -> move = ", "for parcel in parcels]: -> for parcel in parcels"
BY_NUMBER = (lambda comm, parcels: [parcel.fill_(number) for number, parcel in enumerate(parcels)],
             "of 1 parcels, number 0 arrives with wrong contents")  # fmt: skip

test_refused = refusing({
    "ex-processes-lap everybody_knows": [
        (lambda comm, mine: comm.size * (comm.size + 1) / 2, "with 2 ranks, which bring"),
        ((f"{FIRST}if rank == 0:", f"{SECOND}if False:"), "rank 1 returns"),  # a lap, and no other
        ((f"{FIRST}if True:", f"{SECOND}if rank < p - 1:"), "in 3 rounds, and 2 are enough"),
        (lambda comm, mine: collectives.all_reduce(comm, torch.tensor([mine])), "all_reduce is the library's"),
        (lambda comm, mine: (to_and_from_0(comm, token := torch.tensor([mine])), token.item())[1],
         "in a ring it talks to its right neighbor only"),
        (("comm.send(token, dst=right)     # -> comm.isend(token, dst=right)     #",
          "    comm.send(token, dst=right)\n    return ->     comm.isend(token, dst=right)\n    return"),
         "with 2 ranks 2 sends nobody waits for"),
        (lambda comm, mine: comm.barrier(), "rank 0 returns None, not"),
    ],
    "ex-processes-two-points two_points": [
        ("51.6, 0.398e-9, 129.5e3, 0.52, 4.04e-3", "alpha, in seconds: not 51.6, which is a million times too large"),
        ("52e-6, 0.45e-9, 129.5e3, 0.52, 4.04e-3", "beta, in seconds per byte: not 4.5e-10"),
        ("50e-6, 0.398e-9, 129.5e3, 0.52, 4.04e-3", "alpha, in seconds: not 5e-05"),
        ("51.6e-6, 0.398e-9, 129.5e3, 4.04e-3, 0.52", "How often is alpha paid"),
        ("51.6e-6, 0.398e-9, 129.5e3, 0.52, ...", "not all is filled in"),
    ],
    "ex-processes-deadlock ways": [
        ("(6, 5), (6, 5), (2, 3), (1, 1)", "way 1: who is the first that can send"),
        ("'deadlock', 'deadlock', (2, 3), (1, 1)", "way 2 is no deadlock"),
        ("'deadlock', (6, 5), (2, 2), (1, 1)", "way 3, 5 ranks: not 2 rounds"),
        ("'deadlock', 6, 2, 1", "way 2: say", "or a pair"),
        ("'deadlock', (6, 5), 'Deadlock', (1, 1)", "way 3 is no deadlock"),
        ("'deadlock', (6, 5), (2, 'deadlock'), (1, 1)", "way 3 is no deadlock among 5 ranks either"),
        ("'deadlock', (6, 5), (2, 3), (2, 2)", "way 4, 6 ranks: not 2 rounds"),
    ],
    "ex-processes-stream in_a_row": [
        BY_NUMBER, (in_one_box, "1 messages for 7 parcels"),
        (f"{MOVE}comm.isend if comm.rank == 0 else comm.irecv", "never arrives"),
        (f"{MOVE}comm.isend if comm.rank == 0 else comm.recv", "rank 0 does not wait for its sends"),
        ("in parcels: -> in parcels[:: 1 - 2 * comm.rank]:", "number 0 arrives with wrong contents"),
        ("in_flight", "7 parcels in 1 rounds: here each is to wait"),
    ],
    "ex-processes-stream in_flight": [
        BY_NUMBER, (in_one_box, "1 messages for 7 parcels"),
        ("work.wait() -> pass", "never arrives"),
        (f"{START}][:len(parcels) * comm.rank]:", "rank 0 does not wait for its sends"),
        (f"{START}[:: 1 - 2 * comm.rank]]:", "number 0 arrives with wrong contents"),
        ("in_a_row", "7 parcels in 7 rounds: start all of them"),
        (f"{START}][-1:]:", "12 sends and receives", "nobody waits for them"),
    ],
    "ex-processes-trace byte_table": [
        ('np.add.at(table, (m["src"], m["dst"]), m["nbytes"]) -> table[m["src"], m["dst"]] = m["nbytes"]', "messages with"),
        ('m["nbytes"]) -> 1)', "and the table has"),
        ("return table -> return table.T", "and the table has"),
        (lambda trace: np.zeros((4, 4)), "for 2 ranks the table has shape (4, 4)"),
    ],
})  # fmt: skip
