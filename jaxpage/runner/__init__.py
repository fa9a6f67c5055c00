"""The device side of the engine: builds batches, runs the compiled step, owns every device array."""
