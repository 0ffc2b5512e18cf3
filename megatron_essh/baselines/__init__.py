"""Models to measure ours against, with the face that loss, engine and benchmark use."""
