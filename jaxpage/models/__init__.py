"""Models as data: a config with one spec per layer, one forward pass for all families, one file of facts per family."""
