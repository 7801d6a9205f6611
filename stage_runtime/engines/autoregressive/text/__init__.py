"""Translates between clients' text and the engine's tokens: prompts, calls of tools, grammars, tokens to text."""
