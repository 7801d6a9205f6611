"""The clients of an engine core: in this process (`inproc`), in one of its own (`sync_mp`, `async_mp`), in several
(`data_parallel`). `making` chooses. The stage is the client in a pipeline.
"""
