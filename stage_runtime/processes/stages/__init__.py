"""The processes of a stage: its roles, their incarnations, and how they end."""
