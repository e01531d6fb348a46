"""Every word that a widget shows, in one table, so that another edition of the book can have its own."""

CONTROLS = {
    "first": "First step",
    "previous": "Previous step",
    "play": "Play",
    "pause": "Pause",
    "next": "Next step",
    "last": "Last step",
    "speed": "Speed",
    "factor": "{x}×",
}

PLAYER = CONTROLS | {
    "scrub": "Position",
    "counter": "step {i} of {n}",
    # the picture
    "rank": "rank {name}",
    "contribution": "contribution of rank",
    "contribution_of": "contribution of",
    "complete": "complete",
    "repeated": "counted more than once",
    "tag": "tag {tag}",
    "cell": "{label}: from {from}",
    "blank": "blank",
    # the strip
    "strip": "What every rank does over time",
    "bar": "{what}: {start} to {end}",
    "computing": "computing",
    "sleeping": "sleeping",
    "waiting": "waiting",
    "combining": "adding up",
    "copying": "copying",
    "moving": "messages",
    # the captions, which Python writes
    "before": "Before the first message.",
    "start": "start",
    "round": "round {k}",
    "sends": "{src} → {dst}: {what}{bytes}",
    "part": "part {label}, ",
    "more": "and {n} more",
    "shortened": "Only the first {shown:,} of {all:,} messages are drawn.",
    "rows_left_out": "Not drawn: {names}.",
}

# What the all-reduce algorithms are called; their order gives each its colour and its dashes.
_KNOWN = ("ring", "halving_doubling", "tree", "flat", "double_tree", "blockwise", "two_rings", "hierarchical")
NAMES = {name: name.replace("_", " ") for name in _KNOWN} | {"halving_doubling": "halving-doubling"}

SWEEP = {
    "title": "All-reduce: time against size",
    "ranks": "Ranks",
    "ranks_now": "{n} ranks",
    "plot": "Time against bytes; left and right arrow keys move the cursor",
    "bytes": "bytes on every rank",
    "seconds": "time",
    "fastest": "fastest",
    "now": "{bytes} on {ranks}: {names}, {time}",
    "same": " and ",
    "slower": "×{x}",
    "crossing": "From {bytes} on, {name} is the fastest.",
    "hint": "Move the cursor with the mouse or the arrow keys; a ring marks where the fastest changes.",
}

EXPLORER = {
    "title": "What an all-reduce does to a machine",
    "machine": "Machine",
    "algorithm": "Algorithm",
    "from": "Route from",
    "to": "to",
    "nobody": "–",
    "restore": "Put the cable back",
    "picture": "{name}: arrow keys go from cable to cable, Enter removes one",
    "device": "device",
    "host": "host (CPU)",
    "switch": "switch",
    "idle": "idle",
    "utilization": "utilization, each way",
    "whole": "All-reduce of {bytes} on {n} devices, {algorithm}: {time}",
    "without": "without {cable}: {time} ({change})",
    "same": "no change",
    "no_run": "without {cable}: impossible, {pair} has no route",
    "impossible": "All-reduce of {bytes} on {n} devices, {algorithm}: impossible, {pair} has no route",
    "busiest": "Busiest: {links}, at {load}",
    "and": ", ",
    "others": "{n} more",
    "cable": "{cable}: {bandwidth} each way, {latency}.",
    "carried": "{src} → {dst} {bytes} ({load})",
    "gone": "{cable}: removed.",
    "remove_hint": "Click or Enter removes it.",
    "restore_hint": "Click or Enter puts it back.",
    "hint": "Point at a cable to read it, click it to remove it; click two devices to see the route between them.",
    "direct": "{nodes}: 1 link, {latency}, {bandwidth}",
    "path": "{nodes}: {n} links, {latency}, {bandwidth}",
    "arrow": " → ",
    "to_itself": "A device reaches itself in no time.",
    "no_path": "{src} → {dst}: no route",
}

RACE = CONTROLS | {
    "title": "All-reduce: {bytes} on {topology}",
    "race": "Race of all-reduce algorithms",
    "scrub": "Time",
    "counter": "{now} of {end}",
    "complete": "share of all memory with the complete sum",
    "gathered": "summands that have come together, on average",
    "seconds": "time since the start",
    "percent": "{x} %",
    "finish": "{place}. {time}",
    "slower": "×{x}",
    "start": "All ranks start with their own data.",
    "leading": "{names} ahead: {share} % of the memory is complete.",
    "nothing": "No place in memory holds the complete sum yet.",
    "finished": "{names} finished in {time}.",
    "and": ", ",
}
