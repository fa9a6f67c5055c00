"""Puts scheduler and runner together, and offers them to programs: ``LLM`` and ``AsyncLLMEngine``."""
