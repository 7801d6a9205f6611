"""The page for people at `GET /`: what a browser loads, and the events that it shows.

Here: the files and their headers (`files`), what the page shows of a coordinator (`snapshots`, pure), the stream of it
(`feed`). How it is drawn: ``assets``. Requests that the page sends go to the routes that all clients use.
"""
