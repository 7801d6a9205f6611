"""`/v1/realtime`: a conversation over a WebSocket, by OpenAI's events.

`session` decides what each event leads to and does no I/O; `room` is the socket, the requests and the codec around it.
"""
