"""Attention, which no stand-in computes."""
