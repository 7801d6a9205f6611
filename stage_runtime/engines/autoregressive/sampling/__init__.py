"""Chooses tokens by their logits: the parameters of a request, and the sampler of a step."""
