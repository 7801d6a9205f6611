"""The tokens of a request's prompt: chat templates, marked client text, rows beside token ids."""
