"""The checks of *Topology-aware and dynamic*: wrong answers are refused in words."""

from solutions import refusing, tried

WEIGHTS, PAYS = "np.exp(-ages / patience) / seconds -> ", "then < (1 - gain) * now and saves * horizon > setup -> "
LEAST = "is possible and the least"

test_refused = refusing({
    "ex-adapt-hand by_hand": [
        ("15, 8, 0.8, 139", "only one"), ("1.875, 1.875, 0.8, 139", "each of 8"),
        ("1.875, 8, 800, 139", "thousand times too large"), ("1.875, 8, 0.6, 139", "when is 30"),
        ("1.875, 8, 0.8, 400", "which age"),
    ],
    "ex-adapt-place place": [
        (lambda topology, nodes: nodes, "links"), (lambda topology, nodes: sorted(nodes), "links"),
        (lambda topology, nodes: nodes[:-1], "each of the nodes once"), (lambda topology, nodes: len(nodes), "a list of nodes"),
        (lambda topology, nodes: topology.devices[::2] + topology.devices[1::2], "links"),
        (lambda topology, nodes: topology.devices, "links"),
        (lambda topology, nodes: [node for node in topology.devices if node in nodes], "links"),
        (lambda topology, nodes: sorted(nodes, key=lambda node: int(node[3:])), "links"),
    ],
    "ex-adapt-fit fit": [
        (f"{WEIGHTS}np.ones(len(sizes))", "weigh by 1 / seconds"), (f"{WEIGHTS}1 / seconds", "50 steps ago"),
        (f"{WEIGHTS}np.exp(-ages / patience / 2) / seconds", "steps ago"),
        (f"{WEIGHTS}np.exp(-ages / 10) / seconds", "patience of 3"),
        (lambda *_: 3, "a pair"), ("return alpha, beta -> return beta, alpha", "is fitted as"),
    ],
    "ex-adapt-change change": [
        (f"{PAYS}then < now", "so stay"), (f"{PAYS}False", "so change"), (f"{PAYS}then < (1 - gain) * now", "so stay"),
        (f"{PAYS}then * (1 + gain) < now and saves * horizon > setup", "gain 50%"),
        (f"{PAYS}saves > gain and saves * horizon > setup", "so change"),
    ],
    "ex-adapt-oracle oracle": [
        ("(change if k else 0) -> 0", LEAST), ("min(spent[name], moved) -> spent[name]", LEAST),
        ("for name in stage} -> for name in stage}\n        best = min(spent.values())\n"
         "        spent = {name: paid if paid == best else math.inf for name, paid in spent.items()}", LEAST),  # greedy
        ("spent = dict.fromkeys -> change *= len(stages) <= 5; spent = dict.fromkeys", "299.5 s are the least"),
    ],
    "ex-adapt-bug decide": [
        (lambda comm, mine: min(mine, key=mine.get), "they decide for"),
        ('all_reduce(comm, times, algorithm="tree") -> d2lps.collectives.broadcast(comm, times, 0)', "on the average"),
        ("for name in names], -> for name in names] * 50,", "256 bytes"), ("sorted(mine) -> list(mine)", "they decide for"),
        (lambda comm, mine: "ring", "on the average"),
    ],
})  # fmt: skip


def test_place_may_use_up_the_list_that_it_is_given():
    assert tried("ex-adapt-place place", "[nodes[0]], list(nodes[1:]) -> [nodes.pop(0)], nodes")
