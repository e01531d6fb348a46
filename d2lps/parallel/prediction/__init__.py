"""What a plan would take on a cluster that nobody has: a step's time, its memory, and where the time goes.

`parts.py` writes down what each part of a model computes, keeps and sends; `program.py` what a rank does with them, as `train`
does. Whoever runs that program gives it time: `priced.py` with prices, for which `prices.py` has simulated each collective once,
and `beside.py` those that meet on a link; `messages.py` with every message, for small cases. `predict.py` asks, `calibrate.py`
fits, `search.py` compares.
"""
