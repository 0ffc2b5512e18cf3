"""Measures of trained models: a file each, that takes a model and data and returns plain numbers."""
