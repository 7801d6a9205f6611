"""KV connectors: where prompts' keys and values come from or go to. Above the core, which knows their interface."""
