"""Bodies of requests: JSON, forms, their types, and the media that they name."""
