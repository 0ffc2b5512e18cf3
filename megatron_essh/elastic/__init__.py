"""Elasticity: which capacities exist, which of them trains when, and what a reduced capacity learns from the full one."""
