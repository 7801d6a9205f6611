"""One HTTP request and its answer: keys, origins, memory, errors, times, counts. Knows no routes."""
