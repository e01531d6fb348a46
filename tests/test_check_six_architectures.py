"""The checks of *Six network architectures*: wrong answers are refused in words that say why."""

from solutions import refusing, tried

from d2lps.gossip import mix

PORT = {"one_server": 16, "servers": 1.875, "ring": 1.875, "one_peer": 1}
JOBS = {"recommender": "parameter server", "one_machine": "ring", "giant": "hybrid", "pod": "hierarchical",
        "spot": "cloud-native", "shared": "dynamic"}  # fmt: skip
STEPS, SHARES = "max(1, math.ceil(math.log(eps) / math.log1p(-gap))) -> ", "left + np.diag(np.delete(W[:, dead], dead)) -> "
ALONE = "max(ring * dense + touched, m / s * touched) -> ring * dense + touched"
BEST = "around = max -> return {}\n    around = max"

test_refused = refusing({
    "ex-six-peer one_peer": [
        (lambda comm, tensor, step: tensor.add_(0),
         "2 ranks, after 1 step, rank 0 has 1 of rank 0, not 0.5 of rank 0, 0.5 of rank 1"),
        ("2 ** (step % math.ceil(math.log2(comm.size))) -> 1", "4 ranks, after 2 steps"),
        ("hop = 2 -> hop = -2", "4 ranks, after 1 step"),
        (lambda comm, tensor, step: mix(comm, tensor, "one_peer", step), "mix is the library's"),
        ("other = -> others = [rank for rank in range(comm.size) if rank != comm.rank]\n"
         "    comm.exchange([(tensor, dst) for dst in others], [(torch.empty_like(tensor), src) for src in others])\n"
         "    other =", "with 8 ranks somebody sends"),
    ],
    "ex-six-rounds rounds": [
        ("math.ceil -> math.floor", "gap 0.05: 134 steps leave 0.00104"),
        (f"{STEPS}math.ceil(math.log(1 / eps) / gap)", "gap 0.05: 139 steps"),
        (f"{STEPS}math.log(eps) / math.log1p(-gap)", "gap 0.05: 134.67 is no whole number"),
        ("math.log1p(-gap) -> math.log(gap)", "gap 0.05: 3 steps leave 0.857"),
        ("if gap >= 1 -> if gap > 1", "ValueError"),
    ],
    "ex-six-buried buried": [
        (lambda W, dead: W, "3 ranks are left, and your matrix has the shape [4, 4]"),
        (f"{SHARES}left", "row sums are [0.667, 1.0, 0.667]: no means"),
        (f"{SHARES}left / left.sum(1, keepdims=True)", "a ring of 4 without rank 3: column sums are"),
        (f"{SHARES}np.full_like(left, 1 / len(left))", "how should they have heard?"),
        ("return left -> left = left + 0.1 * (np.roll(np.eye(len(left)), 1, 0) - np.eye(len(left)))\n    return left",
         "have heard?"),
        (f"{SHARES}2 * np.eye(len(left)) - left", "can't be negative"),
    ],
    "ex-six-port busiest": [(f"**{PORT | wrong}", words) for wrong, words in (
        ({"ring": ...}, "not all is filled in"), ({"one_server": 1}, "one_server: 1 GB is too little"),
        ({"one_server": 32}, "is too much"), ({"servers": 0.9375}, "answers 15 workers"),
        ({"ring": 0.9375}, "goes round twice"), ({"one_peer": 2}, "how many messages"),
    )] + [("ring=1.875", "nothing is said of one_server")],
    "ex-six-form form": [
        (lambda *job: "mixed", "with 'mixed' the busiest port sends"),
        (lambda *job: "ring", "'ring' is none of 'all-reduce', 'store', 'mixed'"),
        (lambda table, touched, dense, m, s: "mixed" if table > dense else "all-reduce", "with another form"),
        ((ALONE, "max(1, m / s) -> 1"), "with 'store' the busiest port"),
        ((ALONE, "ring * (table + dense) -> math.inf"), "2 workers, 1 servers: with 'mixed' the busiest port sends 2e+08 B"),
        ("2 * (m - 1) / m -> 2", "2 workers, 1 servers"),
    ],
    "ex-six-pieces pieces": [
        (lambda n, p, alpha, beta: p, "16 ranks: 16 pieces take"),
        (lambda n, p, alpha, beta: 10**6, "and fewer would take"),
        (lambda n, p, alpha, beta: 1, "and more would take"),
        (BEST.format("best"), "is no whole number of pieces"),
        (BEST.format("round(best)"), "0 is no whole number of pieces from 1 up"),
    ],
    "ex-six-choose choose": [(f"**{JOBS | wrong}", words) for wrong, words in (
        ({"recommender": "ring"}, "recommender: not 'ring': a batch touches"), ({"giant": "ring"}, "nobody need all of them"),
        ({"spot": "parameter server"}, "who reads the share of one that is gone?"),
        ({"one_machine": "hybrid"}, "what does anything more complicated buy"),
        ({"spot": "MPI"}, "'MPI' is none of cloud-native"),
    )],
})  # fmt: skip


def test_other_right_answers_pass() -> None:
    assert tried("ex-six-choose choose", f"**{JOBS | {'pod': 'hybrid'}}")
    closed = "a, b = np.flatnonzero(np.delete(W[:, dead], dead)); left[[a, b], [b, a]] += 1 / 3; return left"
    assert tried("ex-six-buried buried", f"return {SHARES}{closed}")  # what each gave the dead rank, it gives the other one
