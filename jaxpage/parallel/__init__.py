"""Meshes of devices, and how arrays are laid over them."""
