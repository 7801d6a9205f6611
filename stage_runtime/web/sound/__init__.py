"""Sound on its way to clients: checking what stages give, resampling, the formats clients ask for.

`formats`, `samples.flat` and `pool` run in the coordinator; what touches samples and files (`session`, `encoding`,
`resampling`, `reading`) runs in codec processes. `messages` has the messages between the two.
"""
