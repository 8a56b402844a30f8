"""The daemon's settings: every option declared once, read from flags, environment and YAML.

`option` says what an option is, `options` and `http` declare them all, `settings` joins the places they may come
from, `reserved` holds what later versions will bring.
"""
