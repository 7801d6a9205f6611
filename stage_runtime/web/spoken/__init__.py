"""Text that comes in pieces becomes sound, sentence by sentence: over a WebSocket, or as the body of a request.

The WebSocket's messages (`spoken_messages`) are vLLM-Omni's. `script` decides what is spoken next and does no I/O;
`room` is the socket around it, `body` the request whose answer is one file.
"""
