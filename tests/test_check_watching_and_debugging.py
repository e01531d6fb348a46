"""The checks of *Watching and debugging*: wrong answers are refused in words that say why."""

import numpy as np
from solutions import refusing

OTHERS, MIDDLE = "np.median(np.delete(busy, rank)) -> ", "others[len(others) // 2] -> "
BLAMED, LAST = "sorted(blamed - waiting) -> ", "last = max(last, sent[message[0]]) -> last = "

test_refused = refusing({
    "ex-watch-culprit culprit": [
        (lambda trace: int(np.argmin(trace.time_waiting())), "nobody is slow: not "),
        ("return None -> return int(np.argmax(busy))", "nobody is slow: not "),
        (f"{OTHERS}busy[0]", "rank 0 computes three times as long: not"),
        (lambda trace: trace and None, "rank 3 computes 1.35 times as long: not None; compare what each"),
        ("seconds > 1.3 * np.median(np.delete(busy, rank)) -> trace.time_waiting()[rank] < 0.7 * np.median(trace.time_waiting())",
         "not None; compare what each rank computes"),
        (f"{OTHERS}busy.mean()", "rank 3 computes 1.35"),
        (f"1.3 * {OTHERS}1.1 * np.median(busy)", "rank 1 computes 1.2 times as long: not 1"),
        ("np.median -> np.mean", "rank 0 hardly at all: not 1; how a rank waits tells nothing of it: how much"),
        (f"{OTHERS}busy.min()", "all but rank 1 compute twice as long: not"),
        (f"{OTHERS}np.median(busy)",
         "ranks 2 and 4 compute 1.5 times as long, rank 3 1.8 times: not None; compare what each rank computes"),
    ],
    "ex-watch-count slow": [
        (f"{MIDDLE}sum(others) / len(others)", "patience"), (f"{MIDDLE}others[0]", "patience"),
        (f"{MIDDLE}np.median(others)", "patience"),  # which is between the middle two
        ("1 if above else -2 -> 1 if above else 0", "patience"), ("max(0, -> max(-1000,", "patience"),
        (lambda seconds, patience: [k for k in range(len(seconds[0])) if max(row[k] for row in seconds) > 5], "patience"),
        (lambda seconds, patience: [], "patience"),
    ],
    "ex-watch-patience patience": [
        ("..., ...", "not all is filled in"), ("26, 26 / 12", "patience"), ("48, 4.0", "patience"), ("40, 40 / 12", "patience"),
        ("49, 245", "minutes"),
    ],
    "ex-watch-blame to_blame": [
        (f"{BLAMED}sorted(blamed)", "rank 0 waits for 1, which waits for 3: not [1, 3]; somebody who waits itself"),
        (f"{BLAMED}sorted(waiting)", "rank 2 is late: not [0, 1]"),
        (f"{BLAMED}sorted(set(flights) - waiting)", "all are through: not [0, 1]; does anybody wait for all of these?"),
        (lambda flights: [], "rank 2 is late: not []"),
        ("and max(reached, default=0) < number -> ", "rank 0 is through, and rank 2 is late: not [0, 2]"),
        ("if entry[0] == group -> if True", "rank 0 waits for 1, which waits for 3: not []"),
    ],
    "ex-watch-lamport lamport": [
        (("numbers, sent = [[] for _ in events], {}\n    while any(len(mine) < len(of) for mine, of in zip(numbers, events)): -> "
          "sent = {}\n    for _ in range(2):\n        numbers = [[] for _ in events]",  # as if no message went on for longer
          'if kind == "recv" and message[0] not in sent: -> if False:', f"{LAST}max(last, sent.get(message[0], 0))"),
         "rank 0 receives message 3 at "),
        (lambda events: [list(range(len(mine))) for mine in events], "receives message"),
        (f"{LAST}sent[message[0]]", "rank 1's own events have the numbers [1, 2, 3, 3, 4]: each must have a larger one"),
        (lambda events: [[1] * len(mine) for mine in events], "each must have a larger one"),
        (lambda events: [[] for _ in events], "one number for each event"),
        (lambda events: [[k + 1000 * r for k in range(len(mine))] for r, mine in enumerate(events, 1)], "larger than all"),
    ],
    "ex-watch-liar liar": [
        ("(rank - 1) % p, chunk -> rank, chunk", "where does it arrive wrong first, and who"),
        ("range(1, p): -> reversed(range(1, p)):", "where does it arrive wrong first, and who"),
        (lambda own, came: own and None, "not None"), (lambda own, came: (0, 0), "not (0, 0)"),
    ],
})  # fmt: skip
