"""Which of the configured models are in memory: loaded when they are asked for, unloaded when they are idle.

`entry` has the states of a model, `catalogue` finds one by its name, `trial` tries files and finds what they take, `room` frees
memory for one, and `keeper` loads and unloads.
"""
