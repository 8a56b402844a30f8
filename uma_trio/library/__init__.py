"""The models on this machine: where programs keep them, what they are called, how one is fetched.

Everything here runs in a command's own process, or before the daemon serves. Files of other programs
are only read.
"""
