"""What a plan would take on a cluster that nobody has: a step's time, its memory, and where the time goes.

`parts.py` writes down what each part of a model computes, keeps and sends; `program.py` what a rank does with them, as `train`
does. Whoever runs that program gives it time. `messages.py` runs it on simulated ranks, message by message, which is for small
cases. `priced.py` runs it with a price in place of a collective's messages: `prices.py` has simulated each collective once,
`loads.py` says which links it keeps busy, and `clock.py` lets those that meet on a link share it. `predict.py` asks, and adds up
who holds how much memory; `calibrate.py` measures and fits; `search.py` compares all plans.
"""
