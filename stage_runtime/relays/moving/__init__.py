"""Transfers under way: puts, gets, their account, their pace, and packs larger than a slot."""
