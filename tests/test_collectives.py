"""Every collective by every algorithm: does each rank end with what numpy computes from all inputs at once?

A run costs a tenth of a second, so one run makes hundreds of calls (see `oracles.Call`), and a failure names its call.
"""

import itertools
import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import ALGORITHMS, REDUCING, ROOTED, Call, Outcome, complaints, gloo_has, ours, perform, rooms_for, torchs
from torch.distributed import ReduceOp

import d2lps
from d2lps import collectives
from d2lps.collectives import (
    all_gather,
    all_gather_into_tensor,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
)  # fmt: skip
from d2lps.simulator import simulate
from d2lps.topology import star

RANKS = [1, 2, 3, 5, 8]
SIZES = [0, 1, 2, 7, 64, 1001]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int32, torch.int64]
OPS = ["SUM", "PRODUCT", "MIN", "MAX"]


def ops_for(collective: str, dtype: torch.dtype) -> list[str]:
    if collective not in REDUCING:
        return ["SUM"]
    return [*OPS, "AVG"] if dtype.is_floating_point else [*OPS, "BAND", "BOR", "BXOR"]


def calls(collective: str, ranks: int, algorithms: list[str]) -> Iterator[Call]:
    """Every algorithm with every dtype and op, and with every root and size; what is left open is drawn by chance.

    Above 3 ranks, where two cores make a call slow, an algorithm gets a third of the dtypes and ops, the next one the next.
    """
    chance = random.Random(f"{collective} on {ranks} ranks")
    roots = range(ranks) if collective in ROOTED else [0]

    def call(algorithm: str, op: str, dtype: torch.dtype, root: int, n: int) -> Call:
        return Call(collective, algorithm, op, dtype, root, n, uneven=chance.random() < 0.5, layout=chance.randrange(4))

    kinds = [(op, dtype) for dtype in FLOATS + INTEGERS for op in ops_for(collective, dtype)]
    for k, algorithm in enumerate(algorithms):
        for op, dtype in kinds if ranks <= 3 else kinds[k % 3 :: 3]:
            yield call(algorithm, op, dtype, chance.choice(roots), chance.choice(SIZES[1:]))
        for root in roots:
            for n in SIZES:
                dtype = chance.choice(FLOATS + INTEGERS)
                yield call(algorithm, chance.choice(ops_for(collective, dtype)), dtype, root, n)


def test_every_algorithm_that_there_is_is_tested() -> None:
    def work(comm):
        refusals = {}
        for name in ALGORITHMS:
            parts, whole = [torch.ones(1)], torch.ones(1)
            try:
                ours(comm, Call(name, "none"), parts, parts if name in ("gather", "all_gather", "all_to_all") else [whole])
            except ValueError as error:
                refusals[name] = str(error).partition("choose one of ")[2]
        return refusals

    [refusals] = d2lps.run(work, 1)
    there_are = {name: text.replace("'", "").split(", ") for name, text in refusals.items()}
    assert there_are == ALGORITHMS  # a new one belongs into this table, and its cost into test_costs.py


def check(wanted: list[Call], outcomes: d2lps.Run | list[list[Outcome]]) -> None:
    wrong = complaints(wanted, outcomes)
    assert not wrong, f"{len(wrong)} complaints about {len(wanted)} calls:\n" + "\n".join(wrong[:10])


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("collective", ALGORITHMS)
def test_gives_what_numpy_gives(collective: str, ranks: int) -> None:
    wanted = list(calls(collective, ranks, ALGORITHMS[collective]))
    check(wanted, d2lps.run(perform, ranks, wanted, rooms_for(wanted, ranks), timeout=20))


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("collective", ALGORITHMS)
def test_torch_distributed_gives_the_same(collective: str, ranks: int) -> None:
    # The second oracle, held against the first. gloo has no uneven lists.
    wanted = [call for call in calls(collective, ranks, ["gloo"]) if not call.uneven and gloo_has(call)]
    if not wanted:
        pytest.skip(f"the gloo of torch {torch.__version__} has no {collective}")
    check(wanted, d2lps.run(perform, ranks, wanted, rooms_for(wanted, ranks), torchs, backend="gloo", timeout=20))


@pytest.mark.parametrize("world", ["simulated", "shm", "gloo"])
def test_an_extreme_of_no_number_is_none_by_every_algorithm_and_of_every_world(world: str) -> None:
    algorithms = [name for name in ALGORITHMS["all_reduce"] if world != "simulated" or name != "native"]

    def work(comm):
        found = []
        for algorithm, op in itertools.product(algorithms, (ReduceOp.MAX, ReduceOp.MIN)):
            x = torch.arange(4.0) + comm.rank
            x[comm.rank] = torch.nan  # of each element but the last one rank has no number: the first, the middle one or the last
            all_reduce(comm, x, op, algorithm)
            found.append(str(x.tolist()))
        return found

    run = simulate(work, star(3, 1e9)) if world == "simulated" else d2lps.run(work, 3, backend=world)
    assert run == [["[nan, nan, nan, 5.0]", "[nan, nan, nan, 3.0]"] * len(algorithms)] * 3


@pytest.mark.parametrize("simulated", [False, True])
def test_groups_of_uneven_sizes_work_side_by_side(simulated: bool) -> None:
    colors = [0, 1, 1, None, 2, 2, 2, 2, 2]
    algorithms = [(name, one) for name, known in ALGORITHMS.items() for one in known if not (simulated and one == "native")]
    wanted = [Call(*algorithm, root=0, uneven=True) for algorithm in algorithms]
    rooms = {size: rooms_for(wanted, size) for size in (1, 2, 5)}

    def work(comm):
        group = comm.split(colors[comm.rank], key=-comm.rank)  # the last rank comes first
        return group and (group.rank, group.members, perform(group, wanted, rooms[group.size]))

    run = simulate(work, star(len(colors), 1e9, 1e-6)) if simulated else d2lps.run(work, len(colors), timeout=20)
    assert run[3] is None
    for members in ([0], [2, 1], [8, 7, 6, 5, 4]):
        assert [run[member][:2] for member in members] == [(rank, members) for rank in range(len(members))]
        check(wanted, [run[member][2] for member in members])


def test_a_tensor_that_requires_grad_is_filled_like_any_other() -> None:
    def with_grad(comm, call, mine, out):
        ours(comm, call, [tensor.requires_grad_() for tensor in mine], [tensor.requires_grad_() for tensor in out])
        assert all(tensor.is_leaf for tensor in mine + out)

    wanted = [Call(name, algorithm, layout=k) for name in ALGORITHMS for algorithm in ALGORITHMS[name] for k in (0, 1)]
    check(wanted, d2lps.run(perform, 3, wanted, rooms_for(wanted, 3), with_grad))


def test_complex_numbers_are_added_as_what_they_are() -> None:
    def work(comm):
        plain, conjugated = torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).conj()
        collectives.all_reduce(comm, plain)
        collectives.all_reduce(comm, conjugated)  # torch only notes that it is to be conjugated: the bits are plain's
        return plain.item(), conjugated.item()

    assert d2lps.run(work, 2) == [(2 + 4j, 2 - 4j)] * 2


WIDE = [torch.bool, torch.int8, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.bfloat16]


def each_dtype(comm: d2lps.Communicator, algorithms: list[str]) -> dict[tuple[torch.dtype, str], list[list[int] | str]]:
    """What comes of it by each algorithm; a refusal as its first words."""
    found = {}
    for dtype, op in itertools.product([*WIDE, torch.complex64], [*OPS, "AVG", "BAND", "BOR", "BXOR"]):
        found[dtype, op] = results = []
        for algorithm in algorithms:
            x = torch.tensor([comm.rank + 1, 0, comm.rank]).to(dtype)
            try:
                collectives.all_reduce(comm, x, getattr(ReduceOp, op), algorithm=algorithm)
                results.append(x.view(torch.uint8).tolist())
            except ValueError as error:
                results.append(str(error)[:11])
    return found


@pytest.mark.parametrize("world", ["simulated", "shm", "gloo"])
def test_what_one_algorithm_adds_up_or_refuses_all_do(world: str) -> None:
    algorithms = ["ring", "tree", "native"] if world != "simulated" else ["ring", "flat"]
    if world == "simulated":
        [one, other] = simulate(each_dtype, star(2, 1e9), algorithms)
    else:
        [one, other] = d2lps.run(each_dtype, 2, algorithms, backend=world)
    assert one == other  # on both ranks
    for call, results in one.items():
        assert len({str(result) for result in results if result != "gloo's own "}) == 1, call  # which has not all of them
    assert one[torch.bool, "SUM"][0] == "op=SUM of t" and one[torch.int8, "SUM"][0] == [3, 0, 1]
    assert all(one[dtype, "SUM"][0] == "op=SUM of t" for dtype in WIDE[3:7])


# ---- any sequence of calls --------------------------------------------------------------------------------------------


@st.composite
def programs(draw: st.DrawFn) -> tuple[int, list[Call]]:
    ranks = draw(st.integers(1, 6))

    def call(collective: str) -> Call:
        dtype = draw(st.sampled_from(FLOATS + INTEGERS))
        return Call(
            collective,
            draw(st.sampled_from(ALGORITHMS[collective])),
            draw(st.sampled_from(ops_for(collective, dtype))),
            dtype,
            root=draw(st.integers(0, ranks - 1)) if collective in ROOTED else 0,
            n=draw(st.integers(0, 40)),
            uneven=draw(st.booleans()),
            layout=draw(st.integers(0, 3)),
        )

    return ranks, [call(name) for name in draw(st.lists(st.sampled_from(list(ALGORITHMS)), min_size=1, max_size=12))]


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(programs())
def test_any_sequence_of_collectives(program: tuple[int, list[Call]]) -> None:
    ranks, wanted = program
    check(wanted, d2lps.run(perform, ranks, wanted, rooms_for(wanted, ranks), timeout=20))


# ---- wrong arguments: named before anything is sent -------------------------------------------------------------------

x, y, three = torch.ones(2), torch.ones(3), [torch.ones(2)] * 3
integers, mixed = torch.ones(2, dtype=torch.int64), [torch.ones(2), torch.ones(2).long(), torch.ones(2)]

# What a call is answered with, on one of 3 ranks or on all.
MISTAKES = {
    "TypeError: tensor must be a torch.Tensor, not list: [1.0]": lambda comm: broadcast(comm, [1.0]),
    "TypeError: broadcast(comm, ...) begins with a communicator, not with a Tensor": lambda comm: broadcast(x, comm),
    "ValueError: src=3 is not a rank of this group of 3 (0 to 2)": lambda comm: broadcast(comm, x, 3),
    "ValueError: src=-1 is not a rank of this group of 3 (0 to 2)": lambda comm: broadcast(comm, x, -1),
    "ValueError: src=True is not a rank of this group of 3 (0 to 2)": lambda comm: broadcast(comm, x, True),
    "ValueError: src=1.0 is not a rank of this group of 3 (0 to 2)": lambda comm: broadcast(comm, x, 1.0),
    "ValueError: algorithm='ring' is unknown: choose one of 'flat', 'tree'": lambda comm: broadcast(comm, x, 0, "ring"),
    "ValueError: dst=3 is not a rank of this group of 3 (0 to 2)": lambda comm: reduce(comm, x, 3),
    "ValueError: algorithm='up' is unknown: choose one of 'flat', 'tree'": lambda comm: reduce(comm, x, algorithm="up"),
    "ValueError: tensor has the layout torch.sparse_coo, whose elements cannot be sent as they lie": lambda comm: (
        all_reduce(comm, x.to_sparse())
    ),
    "ValueError: op=AVG of torch.int64 tensors": lambda comm: all_reduce(comm, integers, ReduceOp.AVG),
    "ValueError: op=BXOR works on the bits of integers, not on torch.float32": lambda comm: all_reduce(comm, x, ReduceOp.BXOR),
    "ValueError: op=MIN: complex numbers have no order": lambda comm: all_reduce(
        comm, torch.ones(2, dtype=torch.complex64), ReduceOp.MIN
    ),
    "ValueError: op=SUM of torch.uint16 tensors: torch has no such operation; convert them": lambda comm: (
        all_reduce(comm, torch.ones(2).to(torch.uint16), algorithm="native")
    ),
    "ValueError: op=MAX of torch.float8_e5m2 tensors: torch has no such operation": lambda comm: reduce(
        comm, torch.ones(2).to(torch.float8_e5m2), 0, ReduceOp.MAX
    ),
    "ValueError: op=AVG of torch.float8_e4m3fn tensors: torch has no such operation": lambda comm: (
        reduce_scatter_tensor(comm, *(torch.ones(n).to(torch.float8_e4m3fn) for n in (1, 3)), ReduceOp.AVG)
    ),
    "ValueError: op=SUM of torch.bool tensors: a sum of truth values is not a truth value; use BOR": lambda comm: (
        reduce_scatter(comm, x > 0, [x > 0] * 3)
    ),
    "ValueError: output is float32[6] but input is int64[2]: they must have one dtype": lambda comm: (
        all_gather_into_tensor(comm, torch.ones(6), integers)
    ),
    "TypeError: op must be a torch.distributed.ReduceOp (SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR), not 'sum'": (
        lambda comm: all_reduce(comm, x, "sum")
    ),
    "TypeError: op must be a torch.distributed.ReduceOp (SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR), not 0": (
        lambda comm: all_reduce(comm, x, 0)  # a root, where no root belongs
    ),
    "ValueError: algorithm='best' is unknown: choose one of 'flat', 'tree', 'ring', 'native'": lambda comm: (
        all_reduce(comm, x, algorithm="best")
    ),
    "TypeError: scatter_list must be a list of 3 tensors, one for each rank, not NoneType": lambda comm: (
        comm.rank == 0 and scatter(comm, x)
    ),
    "ValueError: scatter_list has 2 tensors, but the group has 3 ranks: one for each": lambda comm: (
        comm.rank == 0 and scatter(comm, x, three[:2])
    ),
    "ValueError: scatter_list[0] is float32[2] but tensor is float32[3]": lambda comm: comm.rank == 0 and scatter(comm, y, three),
    "ValueError: scatter_list[1] is torch.int64, scatter_list[0] is torch.float32: they must be alike": lambda comm: (
        comm.rank == 0 and scatter(comm, x, mixed)
    ),
    "ValueError: scatter_list was given on rank 1, but only the rank src=0 has one": lambda comm: (
        comm.rank == 1 and scatter(comm, x, three)
    ),
    "ValueError: gather_list was given on rank 2, but only the rank dst=1 has one": lambda comm: (
        comm.rank == 2 and gather(comm, x, torch.ones(3, 2), dst=1)
    ),
    "TypeError: gather_list must be a list of 3 tensors, one for each rank, not Tensor": lambda comm: (
        comm.rank == 0 and gather(comm, x, torch.ones(3, 2))
    ),
    "TypeError: gather_list[1] must be a torch.Tensor, not int: 1": lambda comm: comm.rank == 0 and gather(comm, x, [x, 1, x]),
    "ValueError: tensor_list has 2 tensors, but the group has 3 ranks: one for each": lambda comm: all_gather(comm, three[:2], x),
    "ValueError: tensor is float32[3] but tensor_list[1] is float32[2]": lambda comm: (
        comm.rank == 1 and all_gather(comm, three, y)
    ),
    "ValueError: output has 7 elements, but 3 ranks": lambda comm: all_gather_into_tensor(comm, torch.ones(7), x),
    "ValueError: output is float32[3] but input_list[2] is float32[2]": lambda comm: (
        comm.rank == 2 and reduce_scatter(comm, y, three)
    ),
    "ValueError: op=AVG of torch.uint8 tensors": lambda comm: reduce_scatter(comm, x.byte(), [x.byte()] * 3, ReduceOp.AVG),
    "ValueError: input has 7 elements, but 3 ranks": lambda comm: reduce_scatter_tensor(comm, x, torch.ones(7)),
    "TypeError: output_list must be a list of 3 tensors, one for each rank, not Tensor": lambda comm: all_to_all(
        comm, torch.ones(3, 2), three
    ),
    "ValueError: output_list[0] is int64[2] but input_list[0] is float32[2]": lambda comm: (
        comm.rank == 0 and all_to_all(comm, [integers] * 3, three)
    ),
    "ValueError: output_list[0] is float32[3] but input_list[0] is float32[2]": lambda comm: (
        comm.rank == 0 and all_to_all(comm, [y, x, x], three)
    ),
    "ValueError: algorithm='tree' is unknown: choose one of 'direct', 'pairwise'": lambda comm: all_to_all(
        comm, three, three, "tree"
    ),
}


@pytest.fixture(scope="module")
def refused() -> d2lps.Run:
    """All mistakes in one run: for each, what it was answered with on this rank; and then a call without a mistake."""
    mistakes = MISTAKES

    def work(comm):
        answers = []
        for mistake in mistakes.values():
            try:
                mistake(comm)
                answers.append("")
            except Exception as error:
                answers.append(f"{type(error).__name__}: {error}")
        return answers

    return d2lps.run(work, 3, timeout=5, trace=True)


@pytest.mark.parametrize("message", MISTAKES, ids=lambda message: message[:75])
def test_a_wrong_argument_is_named(refused: d2lps.Run, message: str) -> None:
    answers = [theirs[list(MISTAKES).index(message)] for theirs in refused]
    assert any(answers), "the call was not refused"
    assert all(answer.startswith(message) for answer in answers if answer), answers


def test_nothing_was_sent_before_a_wrong_argument_was_named(refused: d2lps.Run) -> None:
    assert len(refused.trace) == 0 and refused.trace.unmatched == 0


def test_a_refused_call_leaves_the_tensors_and_the_communicator_as_they_were() -> None:
    def work(comm):
        output = [torch.zeros(1) for _ in range(comm.size)]
        with pytest.raises(ValueError):
            collectives.all_to_all(comm, output, [torch.ones(1)] * comm.size, "tree")
        untouched = torch.cat(output).tolist()
        collectives.all_to_all(comm, output, [torch.ones(1)] * comm.size)
        return untouched, torch.cat(output).tolist()

    assert d2lps.run(work, 2) == [([0, 0], [1, 1])] * 2


# ---- the debug mode: what must be alike on all ranks is compared ------------------------------------------------------

DISAGREEMENTS = {
    "rank 1 calls broadcast(tensor=float32[2], src=1, algorithm=tree); "
    "ranks 0, 2 call broadcast(tensor=float32[2], src=0, algorithm=tree)": lambda comm: (
        broadcast(comm, torch.ones(2), int(comm.rank == 1))
    ),
    "rank 2 calls broadcast(tensor=int64[2], src=0, algorithm=tree); "
    "ranks 0, 1 call broadcast(tensor=float32[2], src=0, algorithm=tree)": lambda comm: broadcast(
        comm, torch.ones(2, dtype=torch.int64 if comm.rank == 2 else torch.float32)
    ),
    "rank 0 calls all_reduce(tensor=float32[3], op=SUM, algorithm=ring); "
    "rank 1 calls all_reduce(tensor=float32[4], op=SUM, algorithm=ring); "
    "rank 2 calls all_reduce(tensor=float32[5], op=SUM, algorithm=ring)": lambda comm: all_reduce(
        comm, torch.ones(3 + comm.rank)
    ),
    "rank 0 calls all_reduce(tensor=float32[2], op=SUM, algorithm=tree); "
    "ranks 1, 2 call all_reduce(tensor=float32[2], op=MAX, algorithm=ring)": lambda comm: (
        all_reduce(comm, x, ReduceOp.MAX) if comm.rank else all_reduce(comm, x, algorithm="tree")
    ),
    "rank 0 calls gather(tensor=float32[2], dst=0, algorithm=tree); "
    "ranks 1, 2 call reduce(tensor=float32[2], dst=0, op=SUM, algorithm=tree)": lambda comm: (
        reduce(comm, x) if comm.rank else gather(comm, x, three)
    ),
    "rank 0 calls all_gather(tensor_list=[float32[1], float32[2], float32[3]], algorithm=ring); "
    "ranks 1, 2 call all_gather(tensor_list=[float32[2], float32[2], float32[2]], algorithm=ring)": lambda comm: (
        all_gather(comm, three if comm.rank else [torch.ones(k) for k in (1, 2, 3)], torch.ones(1 + (comm.rank > 0)))
    ),
    "rank 1 calls reduce_scatter_tensor(input=float32[6], op=AVG, algorithm=ring); "
    "ranks 0, 2 call reduce_scatter_tensor(input=float32[6], op=SUM, algorithm=ring)": lambda comm: (
        reduce_scatter_tensor(comm, x, torch.ones(6), ReduceOp.AVG if comm.rank == 1 else ReduceOp.SUM)
    ),
    "rank 2 calls all_to_all(algorithm=direct); ranks 0, 1 call all_to_all(algorithm=pairwise)": lambda comm: (
        all_to_all(comm, three, three, "direct" if comm.rank == 2 else "pairwise")
    ),
}


@pytest.fixture(scope="module")
def compared() -> d2lps.Run:
    disagreements = DISAGREEMENTS

    def work(comm):
        answers = []
        for disagreement in disagreements.values():
            try:
                disagreement(comm)
                answers.append("")
            except d2lps.Mismatch as error:
                answers.append(str(error))
        collectives.all_reduce(comm, total := torch.ones(1))  # a good call goes through
        return answers, total.item()

    return d2lps.run(work, 3, timeout=5, debug=True, trace=True)


@pytest.mark.parametrize("message", DISAGREEMENTS, ids=lambda message: message[:75])
def test_debug_mode_tells_every_rank_who_disagrees(compared: d2lps.Run, message: str) -> None:
    answers = [theirs[list(DISAGREEMENTS).index(message)] for theirs, _ in compared]
    assert answers == [f"the ranks disagree: {message}"] * 3


def test_debug_mode_lets_nothing_move_before_the_ranks_agree(compared: d2lps.Run) -> None:
    assert [total for _, total in compared] == [3, 3, 3]
    assert len(compared.trace) == 12 and compared.trace.unmatched == 0  # the good call's: 2(p - 1) messages a rank


def test_debug_mode_names_the_ranks_of_the_whole_run_in_a_group() -> None:
    def work(comm):
        group = comm.split(comm.rank // 2)
        with pytest.raises(d2lps.Mismatch) as told:
            collectives.broadcast(group, torch.ones(2), src=group.rank)
        return str(told.value)

    assert d2lps.run(work, 4, debug=True)[3] == (
        "the ranks disagree: rank 2 calls broadcast(tensor=float32[2], src=0, algorithm=tree); "
        "rank 3 calls broadcast(tensor=float32[2], src=1, algorithm=tree)"
    )
