"""Owns which tokens a sample may take: grammars (JSON schema, regex, choice, context-free) and banned words.

It must not know requests, steps or devices: a mask is a row of bits in host memory.
"""

from jaxpage.grammar.compiler import CompiledGrammar, GrammarCompiler, GrammarError
from jaxpage.grammar.constraints import ConstraintBuilder

__all__ = ["CompiledGrammar", "ConstraintBuilder", "GrammarCompiler", "GrammarError"]
