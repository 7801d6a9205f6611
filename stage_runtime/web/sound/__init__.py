"""Sound on its way to clients: checking what stages give, resampling, the formats clients ask for.

`formats`, `samples.flat` and `pool` run in the coordinator; what touches samples and files (`codec_session`,
`encoding`, `resampling`, `reading`) runs in codec processes. `codec_messages` has the messages between the two.
"""
