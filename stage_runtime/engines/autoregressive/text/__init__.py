"""Between the words of a client and the tokens of the engine: prompts, calls of tools, grammars, tokens to text."""
