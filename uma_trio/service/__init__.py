"""The daemon's service for its front ends: requests, streams of tokens, and admin operations."""
