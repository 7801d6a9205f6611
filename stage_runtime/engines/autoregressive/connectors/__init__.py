"""KV connectors: where prompts' keys and values come from or go to. They stand above the core, which knows their
interface.
"""
