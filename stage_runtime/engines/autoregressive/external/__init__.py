"""Another engine under the same stage: openvino-genai, by one word (``omni.Autoregressive(engine=…)``).

It has a client as `process_stage` wants it. Prompts, deliveries, stop strings, aborts and metrics are the stage's.
The package is an optional dependency (extra ``openvino``), imported when such an engine is loaded.
"""
