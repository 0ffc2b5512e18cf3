"""Elasticity: which capacities there are, which of them trains when, and what a reduced one learns from the full."""
