"""The language model, as single-device code: a capacity is passed down, every module takes prefix views of its own
tensors, and nothing here knows of ranks."""
