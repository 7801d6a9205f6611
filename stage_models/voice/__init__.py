"""A spoken question answered aloud, by small models that ship inside PyPI packages (the extra ``demo``).

This package has the stages of ``examples/voice/pipeline.yaml``. Model code is apart from the glue:

    conversation    the values that stages exchange           routing      which way a request goes
    audio           bytes -> mono 16 kHz and back               detection    where somebody speaks (Silero)
    recognition     speech -> text (Whisper tiny.en)            retrieval    question -> facts (MiniLM)
    prompting       facts + question -> chat messages           checkpoints  weights inside packages, converted once
    synthesis       sentence -> sound (piper)                   sentences    a text stream -> sentences
    stages          the factories: all of it as stages, SmolLM2-135M by omni.Autoregressive

Nobody imports this package: a pipeline's YAML names its factories. Importing it loads no model and no torch.
"""
