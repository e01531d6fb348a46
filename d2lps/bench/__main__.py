"""The command line: `python -m d2lps.bench [all_reduce] [startup] [simulator] [kvstore] [ddp] [--json FILE]`."""

import argparse

from d2lps.bench import all_reduce, ddp, figures, kvstore, simulator, startup

TABLES = {"all_reduce": all_reduce.table, "startup": startup.table, "simulator": simulator.table, "kvstore": kvstore.table}
TABLES["ddp"] = ddp.table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m d2lps.bench", description=__doc__)
    parser.add_argument("tables", nargs="*", metavar="table", help=f"one or more of {', '.join(TABLES)}; by default all")
    parser.add_argument("--json", metavar="FILE", help="also write the figures of all_reduce to a file")
    arguments = parser.parse_args()
    names = arguments.tables or list(TABLES)
    unknown = [name for name in names if name not in TABLES]
    if unknown:
        parser.error(f"there is no table {', '.join(unknown)}; choose from {', '.join(TABLES)}")
    for name in names:
        print(TABLES[name](), end="\n\n", flush=True)
    if arguments.json:
        figures.write(arguments.json)


# The spawned ranks of a table import this file again, under another name.
if __name__ == "__main__":
    main()
