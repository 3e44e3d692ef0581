"""`python -m gdncp.bench`: our kernel sets and every installed peer, side by side in one process.

Reading order: `cases` (what is run), `ours` and `peers` (who runs it), `reference` (what is right), `timing` (how time
is taken), `run` (one case, start to end), `machine` (where), `tables` and `report` (what a person reads).
"""
