"""Qwen3-Omni as stages of their own: text, pictures and sound in, text and speech out.

This package has the stages of ``examples/qwen3_omni/pipeline.yaml`` (extras ``engine`` and ``qwen3-omni``):

    values       what stages exchange                        routing     which way a request goes
    checkpoint   parts of a checkpoint, loaded strictly      tiny        a checkpoint made in code
    preparing    messages, pictures, sounds -> prompt        encoding    patches and mel frames -> rows, with a cache
    positions    where rows stand for rotary embedding       thinking    prompt and answer of the thinker
    speaking     the talker's prompt and its stream          decoders    both decoders, for omni.Autoregressive
    vocoder      frames of codes -> samples, by pieces       batching    pieces of several requests in one pass
    memory       what each stage takes, from the config      stages      the factories

Nobody imports this package: a pipeline's YAML names its factories.
"""
