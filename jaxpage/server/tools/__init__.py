"""Tools of a chat: which a client offers, how a model is told and forced to call them, and reading its calls."""
