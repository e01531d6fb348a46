"""The checks of *Planning*: wrong answers are refused in words, and who has rounded is right, too."""

from solutions import refusing, tried


def test_rounded_answers_pass():
    for name, answer in ("bisection", "(614, 88, 0.25)"), ("power", "(21, 23, 30)"), ("units", "(200, 4.4, 64)"):
        assert tried(f"ex-planning-{name} {name}", answer)


BEGIN = "failures, now, done = -> {}; failures, now, done ="
FIT = "np.polyfit(1 / np.array(n, dtype=float), t, 1) -> np.polyfit([1 / n[0], 1 / n[-1]], [t[0], t[-1]], 1)"
LINE = "T(n) = a + b/n"

test_refused = refusing({
    "ex-planning-interval interval": [
        ("(27.7, 0.5)", "8 times as often"), ("(9.8, 0.25)", "under a root"), ("9.8", "2 numbers"),
    ],
    "ex-planning-bisection bisection": [
        ("(1228.8, 175.5, 0.245)", "Half of the devices"), ("(614.4, 614.4, 0.245)", "a seventh"),
        ("(614.4, 87.77, 0.28)", "Seven eighths"),
    ],
    "ex-planning-power power": [
        ("(167.1, 184, 238)", "2,048 machines"), ("(20.89, 32.8, 42.5)", "PUE 1.1"), ("(20.89, 22.98, 1.24)", "MWh"),
    ],
    "ex-planning-units units": [
        ("(1600, 4.44, 64)", "8 bits are a byte"), ("(200, 0.556, 64)", "12.5 GB/s"), ("(200, 4.44, 8)", "divides"),
        ("...", "nothing is filled in"),
    ],
    "ex-planning-survive survive": [
        ("now:\n            now = failures.pop(0) + restart -> now:\n            failures.pop(0)", "while it restarts"),
        ("min(interval, work - done) -> interval", "is shorter"),
        (">= now + piece + save -> >= now + piece", "does not count"),
        ("failures[0] >= -> failures[0] >", "at the very moment"),
        ("if not failures or failures[0] >= now + piece + save -> if True", "one failure in the second interval"),
        (BEGIN.format("restart = 5.0"), "by chance"), (BEGIN.format("save = 1.0"), "by chance"),
        (lambda *given: "soon", "no number of seconds"), (lambda *given: float("nan"), "without a failure"),
        (lambda failures, work, interval, save, restart: work, "without a failure"),
    ],
    "ex-planning-amdahl amdahl": [
        (FIT, "least squares, where every time counts alike, has the share 0.216, not "),
        (lambda n, t: t[-1] / t[0], LINE), ((FIT, "float(base / -> float(slope /"), LINE),
        (lambda n, t: (t[-1] - t[0] / n[-1]) / (1 - 1 / n[-1]) / t[0], LINE), (lambda n, t: "0.2", "is no number"),
    ],
})  # fmt: skip
