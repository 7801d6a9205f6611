"""From `omni.Autoregressive` to an engine core: loads the model and prepares its weights for the device."""
