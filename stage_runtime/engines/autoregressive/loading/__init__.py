"""Makes the engine core of an `omni.Autoregressive`: loads the model and prepares its weights for the device."""
