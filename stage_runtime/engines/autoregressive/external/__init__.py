"""Another engine under the same stage: openvino-genai or vLLM, by one word (``omni.Autoregressive(engine=…)``).

Each has a client as `process_engine` wants it. Prompts, deliveries, stop strings, aborts and metrics are the stage's.
The packages are optional dependencies (extras ``openvino``, ``vllm``), imported when such an engine is loaded.
"""
