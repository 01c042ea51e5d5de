"""Mixers that follow attention: one recurrence, and the forms in which it can be computed."""
