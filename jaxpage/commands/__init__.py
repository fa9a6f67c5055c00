"""The subcommands of ``jaxpage``, one a file; each also runs as a module. ``cli.py`` finds them; nothing else does."""
