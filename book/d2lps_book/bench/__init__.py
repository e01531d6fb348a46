"""How fast is it, on this machine? `python -m d2lps_book.bench` prints every table, `python -m d2lps_book.bench startup` one.

Only the ratios of figures that were measured in one run carry over to another machine.
"""
