"""The spectral banks that initialise the modal tables (section 2), in NumPy float64.

`hankel` finds the channels, `matrix_pencil` fits damped modes to one, `banks` names the ways of filling the
tables from them, and `cache` keeps results on disk. Nothing here knows of PyTorch.
"""
