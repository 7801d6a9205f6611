"""`/v1/audio/speech/stream`: text that comes in pieces becomes sound, sentence by sentence, over a WebSocket.

The messages are vLLM-Omni's. `script` decides what is spoken next and does no I/O; `room` is the socket, the requests
and the codec around it.
"""
