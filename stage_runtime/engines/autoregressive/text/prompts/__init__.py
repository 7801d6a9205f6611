"""From a request to prompt tokens: chat templates, marked client text, rows beside token ids."""
