"""HTTP: the only room with FastAPI, uvicorn and starlette.

Calls `coordinator.events.Desk` and nothing else of ours above `wire`. `processes` wires it: `app.make_app(desk,
settings)` makes the application, `probes.make_probes(desk)` the one for the probe port, `server.Server` runs either.
"""
