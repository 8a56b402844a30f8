"""The life of a cost model: measured at start-up, kept in a file, refined while the engine is idle.

The model itself is pure and belongs to the policies (:mod:`uma_trio.policy.cost`).
"""
