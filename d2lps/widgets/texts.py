"""Every word that a widget shows, in one table, so that another edition of the book can have its own."""

TEXTS = {
    # controls, and what a reader hears of them
    "first": "First step",
    "previous": "Previous step",
    "play": "Play",
    "pause": "Pause",
    "next": "Next step",
    "last": "Last step",
    "speed": "Speed",
    "factor": "{x}×",
    "scrub": "Position",
    "counter": "step {i} of {n}",
    # the picture
    "rank": "rank {name}",
    "contribution": "contribution of rank",
    "complete": "complete",
    "repeated": "counted more than once",
    "message": "{src} → {dst}: {bytes}",
    "tag": "tag {tag}",
    "cell": "{label}: from {from}",
    "blank": "blank",
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
