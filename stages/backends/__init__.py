"""Backends: one adapter per kind of engine."""
