"""Benchmarks: the daemon beside llama.cpp's own programs, in one run, with one client.

``python -m benches list`` names the scenes; benches/README.md says how one is added.
"""
