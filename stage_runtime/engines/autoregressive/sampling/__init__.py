"""From logits to tokens: the parameters of a request, and the sampler of a step."""
