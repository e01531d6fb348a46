"""The checks of *Consistency*: wrong answers are refused in words that say why."""

import math
from typing import Any

import pytest
from solutions import refusing

from d2lps_book.check import consistency as check

PAUSE = {"BSP": 52, "ASP": 46, "SSP(2)": 50, "SSP(4)": 48, "SSP(6)": 46, "SSP(8)": 46}


@pytest.mark.parametrize("judge", [check.server, check.aware])
def test_an_empty_class_is_a_stub(judge: Any) -> None:
    class Mine: ...

    assert judge(Mine).text == "Mine is still empty"


def test_pauses() -> None:
    assert check.pause(**PAUSE)
    assert check.pause(**dict.fromkeys(PAUSE, ...)).text == "not all is filled in"
    assert check.pause().text.startswith("nothing is said of BSP, ASP")
    assert check.pause(**{rule: 52 for rule in PAUSE if rule != "SSP(8)"}).text == "nothing is said of SSP(8)"
    assert not check.pause(**PAUSE | {"BSP": math.nan})


RULE, LIMIT = "min(clocks) >= mine - bound -> ", "workers * limit if mean else limit -> "
GATHERED, TIME = "(few + f * (1 - few)) -> ", "/ (few + f * (1 - few)) -> "
PUSH, DIVISOR = 'kv.push("w", gradient) -> ', "(1 + delay) -> "
LOCKED = "with self.lock:\n            self.value = self.value + gradient -> "

test_refused = refusing({
    "ex-consistency-rule may_read": [
        (f"{RULE}sum(clocks) / len(clocks) >= mine - bound", "with bound 1 and clocks [0, 2], worker 1 reads too early"),
        (f"{RULE}min(clocks) > mine - bound", "with bound 0 and clocks [0], worker 0 waits in vain"),
        (f"{RULE}max(clocks) >= mine - bound", "reads too early"),
        (f"{RULE}mine - min(clocks) <= 3", "reads too early"),
        (f"{RULE}True", "reads too early"),
        (f"{RULE}mine == min(clocks) or bound == float('inf')", "waits in vain"),
        (f"{RULE}sorted(clocks)[:3][0] == clocks[0] and clocks[0] >= mine - bound", "waits in vain"),
        (f"{RULE}min(clocks) >= mine - int(bound)", "OverflowError"),
        (f"{RULE}all(clocks.pop() >= mine - bound for _ in clocks[:])", "it changed the clocks"),
    ],
    "ex-consistency-pause pause": [(f"**{PAUSE | wrong}", words) for wrong, words in (
        ({"BSP": 46}, "BSP takes more than 46 s"), ({"BSP": 58}, "BSP takes less"), ({"ASP": 40}, "ASP takes more"),
        ({"ASP": 52}, "ASP takes less"), ({"SSP(2)": 52}, "how far may worker 1 run on"), ({"SSP(2)": 48}, "SSP(2) takes more"),
        ({"SSP(4)": 46}, "SSP(4) takes more"), ({"SSP(8)": 44}, "SSP(8) takes more"),
    )],
    "ex-consistency-sum largest_rate": [
        (f"{LIMIT}2 / (1 if mean else workers)", "does not converge"),
        ("(2 * workers - 1) -> (2 * workers + 1)", "still converges"),
        (f"{LIMIT}limit", "still converges when each push"),
        (f"{LIMIT}math.pi / (2 * workers - 2 or 1.57) * (workers if mean else 1)", "does not converge when each push, of"),
        (f"{LIMIT}1.672 if mean else 0.209", "1 worker, mean: you say 1.67, but 1.76 still converges"),
    ],
    "ex-consistency-backup used": [
        ("return (workers - k) / -> return workers /", "k = 1 of 100 workers, q = 0.02, f = 5"),
        ("in range(k + 1) -> in range(k)", "is too little"),
        (f"{TIME}* (few + (1 - few) / f)", "is too much"),
        (f"{GATHERED}(f - (f - 1) * (1 - q) ** (workers - k))", "is too little"),
        ("few = sum -> workers, q, f = 100, 0.02, 5\n    few = sum", "k = 0 of 3 workers"),
    ],
    "ex-consistency-overlap overlap": [
        ("plain", "with 4 workers an iteration takes 91 ms"),
        (("for _ in range -> for step in range", f"{PUSH}step < steps - 1 and kv.push('w', gradient)"),
         "gradient 20 of worker 0's 20 is not at all in the weights"),
        (("for _ in range -> for step in range", f"{PUSH}[kv.push('w', gradient) for _ in range(1 + (step == 0))]"),
         "gradient 1 of worker 0's 20 is 2 times in the weights"),
        (f"{PUSH}kv.rank == 0 and kv.push('w', gradient)", "rounds; one may be missing"),
        (f"{PUSH}kv.push('w', torch.ones_like(gradient))", "80 times in the weights"),
        ("torch.empty_like(weights), None -> weights, None", "computed from a tensor that is still being pulled"),
        ('arriving = kv.pull("w", incoming)\n    arriving.wait() -> pass',
         "gradient 3 is computed from weights without 2 rounds"),
        ("range(steps) -> range(steps - 1)", "in 20 steps worker 0 computed 19 gradients"),
        ("for _ in range(steps):\n        gradient = compute(weights) -> gradient = compute(weights)\n    for _ in range(steps):",
         "computed 1 gradient"),
    ],
    "ex-consistency-aware aware": [
        (f"{DIVISOR}max(delay, 1)", "push 3, with 2 workers and a rate of 1.5: 2 other gradients came"),
        (f"{DIVISOR}(2 + delay)", "moved by 0.25 times the gradient"),
        (f"{DIVISOR}1", "moved by 1.5 times the gradient"),
        (f"{DIVISOR}(1 + self.version)", "push 2, with 1 worker"),
        (f"{DIVISOR}5", "push 1, with 1 worker"),
        (f"{DIVISOR}(-1 - delay)", "moved by -0.5"),
        ("delay) * gradient\n        self.version += 1 -> delay) * gradient\n        self.version = 0",
         "moved by 1.5 times the gradient"),
        ("self.weights.clone(), self.version -> self.weights, self.version", "hand out a copy"),
        ("self.weights.clone(), self.version -> self.weights.clone()", "and is to return two things"),
    ],
    "ex-consistency-lock server": [
        (f"{LOCKED}with self.lock:\n            value = self.value\n        value = value + gradient\n"
         "        with self.lock:\n            self.value = value",
         "2 threads pushed 1 each to a value of 5, and it became 6: two additions ran at the same time"),
        (f"{LOCKED}value = self.value\n        with self.lock:\n            self.value = value + gradient",
         "somebody came between"),
        (("def push -> def __init__(self, value):\n        super().__init__(value)\n"
          "        self.mine = threading.Lock()\n\n    def push",
          f"{LOCKED}with self.mine:\n            value = self.value\n        with self.mine:\n"
          "            self.value = value + gradient"), "became 6"),
        ("with self.lock: -> with threading.Lock():", "at the same time"),
        (f"{LOCKED}self.value += gradient", "became 6"),
        (f"{LOCKED}self.lock.acquire()\n        self.value = self.value + gradient", "a push never came back"),
        (f"{LOCKED}self.lock.acquire()\n        self.value = self.value + gradient\n        self.lock.release()",
         "a push never came back"),
        (f"{LOCKED}if self.lock.acquire(blocking=False):\n            try: self.value = self.value + gradient\n"
         "            finally: self.lock.release()", "2 threads pushed 1 each"),
        (f"{LOCKED}self.value = 2", "1 thread pushed 1 each to a value of 5, and it became 2"),
    ],
})  # fmt: skip
