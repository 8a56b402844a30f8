"""The prefix cache: cells that were computed once are used again, and never change an answer."""
