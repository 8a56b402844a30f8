"""Prompts to tokens and tokens to text; no trio, no clock."""
