"""Weir: disaggregated LLM serving with a KV hand-over that cannot lie."""

__version__ = "0.1.0"
