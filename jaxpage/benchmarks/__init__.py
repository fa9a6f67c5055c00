"""Measurements that anyone can rerun: each module is a command, prints a table and can write JSON.

Nothing in jaxpage imports this package.
"""
