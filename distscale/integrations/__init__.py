"""Thin adapters to other libraries; each is imported by those who use it."""
