"""The rows of one step: the batch, what is kept of each row, and what replaces or feeds them."""
