"""Faults between an operator and its API server, at a call that a test chooses."""
