"""HTTP: the only room with FastAPI, uvicorn and starlette.

Calls `coordinator.events.RequestManagerApi` and nothing else of ours above `wire`. `processes` wires it:
`app.make_app(manager, settings)` makes the application, `probes.make_probes(manager)` the one for the probe port,
`server.Server` runs either.
"""
