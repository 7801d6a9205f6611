"""Routes of OpenAI's and vLLM's clients that stages answer."""
