"""An engine core in a process of its own: input thread, loop, output thread; MessagePack between it and its clients.

Here: messages, their encoding, the process. Not here: who starts it and asks it (`clients`), several of them as one
(`data_parallel`), the core itself (`core`).
"""
