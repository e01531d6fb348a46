"""Every codec on scikit-learn's digits, five seeds, four and sixteen workers: the table that *Compression* shows.

    python tests/codecs_on_digits.py        # many minutes; prints {workers: {codec: [test accuracy of each seed]}}

With names of codecs, those only. The data, the model, the codecs and `train` are the notebook's own.
"""

import json
import sys

from solutions import solution

import d2lps
from d2lps.topology import star

SEEDS, REAL, SIMULATED = 5, 4, 16


def main() -> None:
    chapter = solution("ex-compression-pairs")  # which knows what stands before it
    trials, codecs = chapter.value("trials"), chapter.value("CODECS")
    table: dict[int, dict[str, list[float]]] = {REAL: {}, SIMULATED: {}}
    for name in sys.argv[1:] or codecs:
        jobs = [(codecs[name], True, seed) for seed in range(SEEDS)]
        real = d2lps.run(trials, REAL, jobs, timeout=600.0)
        virtual = d2lps.simulate(trials, star(SIMULATED, 12.5e6, 20e-6), jobs, trace=False)
        for workers, run in ((REAL, real), (SIMULATED, virtual)):
            table[workers][name] = [round(accuracy, 3) for _, accuracy in run[0]]
            print(workers, name, table[workers][name], flush=True)
    print(json.dumps(table))


if __name__ == "__main__":
    main()
