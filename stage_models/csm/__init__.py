"""CSM of transformers (sesame/csm-1b) under `omni.Autoregressive`: text in, frames of Mimi codes out.

This package has the decoder (`decoders`), which uses the same points of the engine as Qwen3-Omni's talker. Nobody
imports this package: a stage names its class.
"""
