"""The command line: `python -m d2lps.bench [startup] [simulator]`."""

import argparse

from d2lps.bench import simulator, startup

TABLES = {"startup": startup.table, "simulator": simulator.table}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m d2lps.bench", description=__doc__)
    parser.add_argument("tables", nargs="*", metavar="table", help=f"one or more of {', '.join(TABLES)}; by default all")
    names = parser.parse_args().tables or list(TABLES)
    unknown = [name for name in names if name not in TABLES]
    if unknown:
        parser.error(f"there is no table {', '.join(unknown)}; choose from {', '.join(TABLES)}")
    for name in names:
        print(TABLES[name](), end="\n\n", flush=True)


# The spawned ranks of a table import this file again, under another name.
if __name__ == "__main__":
    main()
