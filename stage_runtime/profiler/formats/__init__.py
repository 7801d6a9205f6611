"""A run's events as a table for the terminal, a page for the browser, a trace for ui.perfetto.dev."""
