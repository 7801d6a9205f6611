"""Preparations before processes start: their folder, their code, their commands."""
