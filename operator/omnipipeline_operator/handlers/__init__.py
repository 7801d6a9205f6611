"""Thin: kopf's watches, the queue of pipelines to look at, one look at a pipeline, probes and metrics."""
