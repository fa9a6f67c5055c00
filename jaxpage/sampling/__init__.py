"""From logits to token ids, on the device and per row. Knows nothing about requests, blocks or the model."""
