"""Operators: one folder each, a plain PyTorch reference beside the fast versions behind one function."""
