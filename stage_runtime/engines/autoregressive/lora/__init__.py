"""LoRA adapters: read and checked (`checkpoints`), where a model takes them (`sites`), computed (`layers`), by name
(`registry`). An adapter is a sum beside some linear layers; the model's own weights are not changed.
"""
