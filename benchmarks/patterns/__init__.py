"""Attention under a pattern of keys and scores: what each is, the ways to compute it, whether one is right."""
from benchmarks.patterns.choosing import attention as attention
