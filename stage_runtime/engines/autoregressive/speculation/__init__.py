"""Speculative decoding: drafts of a request's next tokens, verified in the step of the token before them."""
