"""Standalone models cut out of an elastic one: slice.py cuts, folder.py stores, tiers.py does both, verify.py
holds an export to its source."""
