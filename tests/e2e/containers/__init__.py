"""Weir in containers, on a real engine."""
