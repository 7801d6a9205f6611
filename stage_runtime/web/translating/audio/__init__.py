"""Speech and transcriptions: bodies to requests, events to answers. Pure."""
