"""HTTP bodies to `OmniRequest`, events to what OpenAI's clients read.

Pure: no socket, no request manager, no clock of its own.
"""
