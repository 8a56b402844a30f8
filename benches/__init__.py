"""Benchmarks: the daemon beside llama.cpp's own programs, in one run, with one client."""
