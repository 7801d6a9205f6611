"""Answers that follow a form: schemas, grammars and their masks."""
